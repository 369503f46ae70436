//! Manual pages: complete and reproducible, and every example works.

use crate::common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{Draconis, has_fuse, mke2fs, report_skipped};

fn generated_pages(draconis: &Draconis, name: &str) -> Vec<(String, String)> {
    let dir = draconis.make_dir(name);
    draconis.run_ok(["manpages", dir.to_str().unwrap()]);
    read(&dir)
}

fn read(dir: &Path) -> Vec<(String, String)> {
    let found = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut pages: Vec<(String, String)> = found
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read_to_string(path).unwrap())
        })
        .collect();
    pages.sort();
    pages
}

#[test]
fn pages_are_complete_and_reproducible() {
    let draconis = Draconis::new();
    let first = generated_pages(&draconis, "first");
    assert!(first.len() > 40);
    assert!(first == generated_pages(&draconis, "second"));
    let version = format!("draconis {}", env!("CARGO_PKG_VERSION"));
    for (name, text) in &first {
        for part in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES"] {
            assert!(text.contains(&format!("\n.SH {part}\n")), "{name}: {part}");
        }
        let title = text.lines().find(|line| line.starts_with(".TH ")).unwrap();
        assert!(title.starts_with(&format!(".TH {name} 1 ")), "{title}");
        assert!(title.contains(&version) && title.contains("Draconis Manual"), "{title}");
        assert!(!text.contains(".SH VERSION"), "{name}");
        // Internal commands have no page.
        assert!(!name.contains("worker") && !name.contains("complete-path"));
    }
    let dated = draconis.make_dir("dated");
    let mut command = draconis.command();
    command.env("SOURCE_DATE_EPOCH", "1700000000").arg("manpages").arg(&dated);
    assert!(command.status().unwrap().success());
    assert!(
        read(&dated)
            .iter()
            .all(|(_, text)| text.contains(" 2023-11-14 ") || text.contains("\"2023-11-14\""))
    );
    if common::is_installed("groff") {
        for (name, _) in &first {
            let page = draconis.path("first").join(format!("{name}.1"));
            let output =
                Command::new("groff").args(["-man", "-Tutf8", "-ww", "-z"]).arg(page).output();
            let errors = output.unwrap().stderr;
            assert!(errors.is_empty(), "{name}: {}", String::from_utf8_lossy(&errors));
        }
    } else {
        report_skipped("what groff says of the pages, since it is not installed");
    }
}

/// Returns the commands of a page's EXAMPLES.
fn page_examples(page: &str) -> Vec<String> {
    let (_, text) = page.split_once(".SH EXAMPLES\n").unwrap();
    let text = text.split("\n.SH ").next().unwrap();
    let plain = |text: &str| {
        text.replace("\\&", "").replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\")
    };
    let parts = text.split(".nf\n").skip(1);
    parts.map(|part| plain(part.split("\n.fi").next().unwrap())).collect()
}

/// Creates the files that the examples name.
fn make_example_directory(draconis: &Draconis, name: &str) -> PathBuf {
    let dir = draconis.make_dir(name);
    for below in ["tree/sub", "mnt", "root/etc", "root/home/ann"] {
        std::fs::create_dir_all(dir.join(below)).unwrap();
    }
    for (path, text) in [
        ("notes.txt", "notes\n"),
        ("tree/file", "file\n"),
        ("tree/sub/other", "other\n"),
        ("root/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
        ("root/home/ann/letter", "Dear reader\n"),
    ] {
        std::fs::write(dir.join(path), text).unwrap();
    }
    std::os::unix::fs::symlink("hosts", dir.join("root/etc/link")).unwrap();
    let image = dir.join("disk.img");
    // A reserve of group descriptors, so that it can grow.
    mke2fs(&image, Some(&dir.join("root")), &["-t", "ext2", "-b", "1024"], "16M");
    draconis.run_ok(["format", dir.join("other.img").to_str().unwrap(), "8M"]);
    let volume = std::fs::read(&image).unwrap();
    let mut disk = vec![0; (1 << 20) + volume.len()];
    disk[1 << 20..].copy_from_slice(&volume);
    // One primary partition of type 0x83 from sector 2048.
    let sectors = u32::try_from(volume.len() / 512).unwrap().to_le_bytes();
    disk[446..458].copy_from_slice(&[0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0]);
    disk[458..462].copy_from_slice(&sectors);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    std::fs::write(dir.join("parted.img"), disk).unwrap();
    let mut tar = Command::new("tar");
    assert!(
        tar.current_dir(&dir).args(["-czf", "tree.tar.gz", "tree"]).status().unwrap().success()
    );
    let store = dir.join("things.store");
    let store = store.to_str().unwrap();
    draconis.run_ok(["store", "create", store, "--size", "64M", "--layout", "cow", "--sparse"]);
    draconis.run_ok(["store", "put", store, "new", dir.join("notes.txt").to_str().unwrap()]);
    for key in ["key", "another"] {
        draconis.run_ok(["kv", "put", store, key, "value"]);
    }
    dir
}

fn run(draconis: &Draconis, dir: &Path, script: &str) -> Output {
    let own = Path::new(crate::common::program()).parent().unwrap();
    let path = format!("{}:{}", own.display(), std::env::var("PATH").unwrap());
    let mut bash = Command::new("bash");
    bash.args(["-euo", "pipefail", "-c", script]).current_dir(dir);
    bash.env("PATH", path).env("DRACONIS_RUNTIME_DIR", draconis.path("run"));
    bash.stdin(Stdio::null()).output().unwrap()
}

#[test]
fn page_examples_work() {
    let ran = run_page_examples(|example| !example.contains("draconis lab"));
    assert!(ran > 50, "{ran}");
}

#[test]
#[ignore = "long: the lab's examples measure, and need draconis-lab to be built"]
fn page_examples_of_lab_work() {
    if !Path::new(crate::common::program()).with_file_name("draconis-lab").exists() {
        return report_skipped("the examples of draconis lab need draconis-lab to be built");
    }
    let ran = run_page_examples(|example| example.contains("draconis lab"));
    assert!(ran > 0, "{ran}");
}

/// Runs the selected examples of all manual pages; returns how many.
fn run_page_examples(is_selected: impl Fn(&str) -> bool) -> usize {
    let draconis = Draconis::new();
    let can_mount = has_fuse("the examples that mount");
    // Created once, because creating a store measures the disk.
    let template = make_example_directory(&draconis, "template");
    let mut ran = 0;
    for (name, page) in generated_pages(&draconis, "pages") {
        let examples = page_examples(&page);
        assert!(!examples.is_empty(), "{name}");
        let dir = draconis.path("at");
        let mut copy = Command::new("cp");
        copy.args(["-a", "--sparse=always"]).arg(&template).arg(&dir);
        assert!(copy.status().unwrap().success());
        for example in examples.into_iter().filter(|example| is_selected(example)) {
            let mounts = ["draconis mount", "draconis umount", "draconis serve"];
            if !can_mount && mounts.iter().any(|word| example.contains(word)) {
                continue;
            }
            let output = run(&draconis, &dir, &example);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name}: {example}: {errors}");
            assert!(!errors.contains("draconis: "), "{name}: {example}: {errors}");
            // Removes files that the next example creates again.
            for made in ["new.img", "new.store", "mnt/notes.txt"] {
                if example.lines().count() == 1 {
                    let _ = std::fs::remove_file(dir.join(made));
                }
            }
            ran += 1;
        }
        for image in ["disk.img", "other.img"] {
            let run = draconis_testkit::judge::e2fsck("-fn", dir.join(image));
            assert!(run.is_success(), "{name}: {}", run.output());
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
    ran
}
