//! Layers created by the kernel's overlayfs, merged by us and by the kernel.

use std::collections::BTreeMap;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use draconis_device::Random;

use crate::common::{
    Draconis, FileProperties, assert_same_trees, has_root, report_skipped, unmount_and_wait,
};
use crate::oci::build::{self, OciLayout, create_tar, run_and_capture, write_docker_archive};
use crate::oci::{merged_tree_properties, volume_tree_properties};
use draconis_testkit::judge::assert_fsck_clean;

/// An overlay mount, unmounted on drop.
struct OverlayMount {
    at: PathBuf,
}

impl OverlayMount {
    /// Mounts `lower` from the lowest on; `None` if the kernel refuses.
    fn mount(dir: &Path, lower: &[PathBuf], upper: &Path) -> Option<Self> {
        let (at, work) = (dir.join("merged"), dir.join("work"));
        let _ = std::fs::remove_dir_all(&work);
        for made in [&at, &work, &upper.to_path_buf()] {
            std::fs::create_dir_all(made).unwrap();
        }
        let lower: Vec<String> = lower.iter().rev().map(|it| it.display().to_string()).collect();
        let options = format!(
            "lowerdir={},upperdir={},workdir={},index=off,redirect_dir=off,metacopy=off",
            lower.join(":"),
            upper.display(),
            work.display()
        );
        let mounted = Command::new("mount")
            .args(["-t", "overlay", "overlay", "-o", &options])
            .arg(&at)
            .output()
            .unwrap();
        if !mounted.status.success() {
            eprintln!("{}", String::from_utf8_lossy(&mounted.stderr));
            return None;
        }
        Some(Self { at })
    }
}

impl Drop for OverlayMount {
    fn drop(&mut self) {
        unmount_and_wait(&self.at);
    }
}

/// Makes random changes to a tree; ignores failures.
fn change_randomly(top: &Path, random: &mut Random, steps: u64) {
    let path = |random: &mut Random| {
        let mut path = top.to_path_buf();
        for _ in 0..=random.next_below(3) {
            path.push(["a", "b", "c", "d"][random.next_below(4) as usize]);
        }
        path
    };
    for step in 0..steps {
        let (at, other) = (path(random), path(random));
        match random.next_below(14) {
            0..3 => drop(std::fs::create_dir(&at)),
            3..6 => {
                let bytes = format!("{step}").repeat(random.next_below(3000) as usize);
                // Opening a FIFO would block.
                if at.symlink_metadata().is_ok_and(|found| found.is_file()) || !at.exists() {
                    drop(std::fs::write(&at, bytes));
                }
            }
            6 if at.components().count() > top.components().count() + 1 => {
                drop(std::fs::remove_dir_all(&at).or_else(|_| std::fs::remove_file(&at)))
            }
            7 => {
                // A directory that is created again is opaque.
                if std::fs::remove_dir_all(&at).is_ok() {
                    drop(std::fs::create_dir(&at));
                }
            }
            8 => drop(std::fs::rename(&at, &other)),
            9 => drop(std::fs::hard_link(&at, &other)),
            10 => drop(symlink("a/b", &at)),
            11 => {
                let mode = 0o400 + random.next_below(0o400) as u32;
                if !at.is_symlink() {
                    drop(std::fs::set_permissions(&at, PermissionsExt::from_mode(mode)));
                }
                drop(std::os::unix::fs::lchown(&at, Some(step as u32), Some(7)));
            }
            12 => {
                let value = format!("value {step}");
                let flags = rustix::fs::XattrFlags::empty();
                let _ = rustix::fs::lsetxattr(&at, "user.mark", value.as_bytes(), flags);
            }
            6 => drop(std::fs::create_dir_all(&at)),
            _ => {
                let kind = rustix::fs::FileType::Fifo;
                let _ = rustix::fs::mknodat(rustix::fs::CWD, &at, kind, 0o644.into(), 0);
            }
        }
    }
}

/// Converts whiteouts in an upper directory to those of images.
fn convert_whiteouts(upper: &Path) {
    let mut stack = vec![upper.to_path_buf()];
    while let Some(dir) = stack.pop() {
        let found = dir.metadata().unwrap();
        let mut names: Vec<PathBuf> =
            std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        for path in names {
            let entry = path.symlink_metadata().unwrap();
            if entry.is_dir() {
                stack.push(path);
            } else if entry.file_type().is_char_device() && entry.rdev() == 0 {
                std::fs::remove_file(&path).unwrap();
                let name = format!(".wh.{}", path.file_name().unwrap().to_str().unwrap());
                std::fs::write(dir.join(name), b"").unwrap();
            }
        }
        let mut value = [0; 8];
        let opaque = rustix::fs::lgetxattr(&dir, "trusted.overlay.opaque", &mut value[..]);
        if opaque.is_ok_and(|len| &value[..len] == b"y") && dir != upper {
            std::fs::write(dir.join(".wh..wh..opq"), b"").unwrap();
        }
        let time = |seconds, nanoseconds| rustix::fs::Timespec {
            tv_sec: seconds,
            tv_nsec: nanoseconds as _,
        };
        let times = rustix::fs::Timestamps {
            last_access: time(found.atime(), found.atime_nsec()),
            last_modification: time(found.mtime(), found.mtime_nsec()),
        };
        let flags = rustix::fs::AtFlags::empty();
        rustix::fs::utimensat(rustix::fs::CWD, &dir, &times, flags).unwrap();
    }
}

/// Layers as tars, and the kernel's merged tree.
type BuiltLayers = (Vec<Vec<u8>>, BTreeMap<PathBuf, FileProperties>);

/// Creates random layers.
fn make_random_layers(dir: &Path, seed: u64) -> Option<BuiltLayers> {
    let mut random = Random::new(seed);
    let empty = dir.join("empty");
    std::fs::create_dir_all(&empty).unwrap();
    let mut lower = vec![empty];
    let mut merged = BTreeMap::new();
    for nth in 0..4 {
        let upper = dir.join(format!("upper{nth}"));
        let overlay = OverlayMount::mount(dir, &lower, &upper)?;
        change_randomly(&overlay.at, &mut random, if nth == 0 { 60 } else { 25 });
        merged = merged_tree_properties(&overlay.at);
        lower.push(upper);
    }
    let mut tars = vec![];
    for (nth, upper) in lower[1..].iter().enumerate() {
        convert_whiteouts(upper);
        let path = dir.join(format!("layer{nth}.tar"));
        // In orders with whiteouts first, and with whiteouts elsewhere.
        create_tar(upper, &path, &[["--sort=name", "--sort=none", "--sort=inode"][nth % 3]]);
        tars.push(std::fs::read(path).unwrap());
    }
    Some((tars, merged))
}

#[test]
#[ignore = "tools: zstd"]
fn layer_merge_matches_overlayfs() {
    let name = "merging layers as the kernel does";
    if !has_root(name) {
        return;
    }
    let mut compared = 0;
    for seed in 0..12 {
        let draconis = Draconis::new();
        let Some((tars, merged)) = make_random_layers(&draconis.make_dir("layers"), seed) else {
            report_skipped(format_args!("{name} needs overlayfs"));
            return;
        };
        compared += merged.len();
        let mut layout = OciLayout::new(draconis.path("oci"));
        let packed: Vec<Vec<u8>> = ["gzip", "zstd", "cat", "gzip"]
            .iter()
            .zip(&tars)
            .map(|(program, bytes)| match *program {
                "cat" => bytes.clone(),
                program => build::compress(program, bytes),
            })
            .collect();
        layout.add_image("made", &packed);
        let archive = draconis.path("oci.tar");
        run_and_capture(
            Command::new("tar").arg("-C").arg(&layout.dir).arg("-cf").arg(&archive).arg("."),
        );
        let docker = draconis.path("docker.tar");
        write_docker_archive(&draconis.path("saved"), &docker, &tars);
        let mut in_turn = vec![];
        for nth in 0..tars.len() {
            let path = draconis.path("layers").join(format!("layer{nth}.tar"));
            in_turn.push(path.display().to_string());
        }
        let origins = [
            vec![layout.source_spec("made")],
            vec![format!("oci-archive:{}", archive.display())],
            vec![format!("docker-archive:{}:made/here", docker.display())],
            in_turn,
        ];
        for (nth, from) in origins.iter().enumerate() {
            if nth > 0 && seed > 2 {
                break;
            }
            let image = draconis.path(&format!("image{nth}"));
            let mut command = vec!["format", "-t", "ext4"];
            for origin in from {
                command.extend(["--from", origin]);
            }
            command.push(image.to_str().unwrap());
            draconis.run_ok(&command);
            assert_fsck_clean(&image);
            assert_same_trees(&volume_tree_properties(&draconis, &image), &merged);
            if nth % 2 == 1 {
                continue;
            }
            // The same into an existing volume.
            let image = draconis.path(&format!("into{nth}"));
            draconis.run_ok(["format", "-t", "ext4", image.to_str().unwrap(), "16M"]);
            let mut command = vec!["untar"];
            for origin in from {
                command.extend(["-f", origin]);
            }
            command.push(image.to_str().unwrap());
            draconis.run_ok(&command);
            assert_fsck_clean(&image);
            assert_same_trees(&volume_tree_properties(&draconis, &image), &merged);
        }
    }
    assert!(compared > 100, "{compared}");
}
