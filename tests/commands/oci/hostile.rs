//! Malicious images: a clear error, no volume, no access outside.

use std::path::Path;
use std::process::Command;

use crate::common::Draconis;
use crate::oci::build::{OciLayout, compress, run_and_capture};
use draconis_testkit::judge::assert_fsck_clean;

/// Returns a tar header with contents.
pub(crate) fn tar_entry(name: &str, kind: u8, target: &str, contents: &[u8]) -> Vec<u8> {
    tar_entry_with_size(name, kind, target, contents.len() as u64, contents)
}

pub(crate) fn tar_entry_with_size(
    name: &str,
    kind: u8,
    target: &str,
    size: u64,
    contents: &[u8],
) -> Vec<u8> {
    let mut header = [0; 512];
    let mut put = |at: usize, text: &str| {
        header[at..at + text.len()].copy_from_slice(text.as_bytes());
    };
    put(0, name);
    put(100, "0000644\0");
    put(108, "0000000\0");
    put(116, "0000000\0");
    put(124, &format!("{size:011o}\0"));
    put(136, "00000000000\0");
    put(148, "        ");
    put(156, &char::from(kind).to_string());
    put(157, target);
    put(257, "ustar\0");
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    let mut all = header.to_vec();
    all.extend(contents);
    all.resize(all.len().next_multiple_of(512), 0);
    all
}

pub(crate) fn join_entries(entries: &[Vec<u8>]) -> Vec<u8> {
    [&entries.concat()[..], &[0; 1024]].concat()
}

/// Creates a volume from a source that must be refused; returns the error output.
pub(crate) fn assert_format_refused(draconis: &Draconis, origin: &str, more: &[&str]) -> String {
    let image = draconis.path("image");
    let before = list_files_below(draconis.dir.path());
    let line = [&["format", "--from", origin], more, &[image.to_str().unwrap()]].concat();
    let told = draconis.run_failing(&line);
    assert_eq!(before, list_files_below(draconis.dir.path()), "{told}");
    told
}

fn list_files_below(dir: &Path) -> Vec<u8> {
    run_and_capture(
        Command::new("find").arg(dir).args(["-not", "-path", "*/run*", "-printf", "%p %s\n"]),
    )
}

#[test]
fn invalid_layers_are_refused() {
    let draconis = Draconis::new();
    std::fs::write(draconis.path("outside"), b"outside").unwrap();
    let file = |name: &str| tar_entry(name, b'0', "", b"evil");
    let long = "7".repeat(30);
    let pax =
        |text: &str| tar_entry("x", b'x', "", format!("{} {text}\n", text.len() + 4).as_bytes());
    for (layers, said) in [
        (vec![join_entries(&[file("../outside")])], "leads out"),
        (vec![join_entries(&[file("a/../../outside")])], "leads out"),
        (vec![join_entries(&[tar_entry("x", b'1', "../outside", b"")])], "leads out"),
        (vec![join_entries(&[tar_entry("x", b'1', "/etc/passwd", b"")])], "or never"),
        (vec![join_entries(&[file("x")]), join_entries(&[file(".wh..")])], "whiteout"),
        (vec![join_entries(&[file("x")]), join_entries(&[file(".wh...")])], "whiteout"),
        (vec![join_entries(&[file("x")]), join_entries(&[file(".wh.")])], "whiteout"),
        (vec![join_entries(&[tar_entry("/", b'2', "/etc", b"")])], "root directory"),
        (vec![join_entries(&[file("x"), file("x/y")])], "no directory"),
        (
            vec![join_entries(&[
                tar_entry("a", b'2', "b", b""),
                tar_entry("b", b'2', "a", b""),
                file("a/x"),
            ])],
            "symbolic links",
        ),
        (vec![join_entries(&[tar_entry_with_size("x", b'0', "", 1 << 32, b"short")])], "middle"),
        (
            vec![join_entries(&[tar_entry_with_size("x", b'x', "", 1 << 32, b"")])],
            "extended header",
        ),
        (vec![join_entries(&[pax(&format!("size={long}")), file("x")])], ""),
        (vec![join_entries(&[pax("mtime=-9223372036854775808.5"), file("x")])], "time"),
        (vec![join_entries(&[pax("GNU.sparse.map=5,9,1,1"), file("x")])], "sparse"),
        (vec![join_entries(&[file("x")])[..514].to_vec()], "middle"),
        (vec![b"no archive at all".repeat(100)], "not a tar archive"),
        (vec![compress("gzip", &join_entries(&[file("x")]))[..50].to_vec()], ""),
    ] {
        for packed in [false, true] {
            let mut layout = OciLayout::new(draconis.path("oci"));
            let layers: Vec<Vec<u8>> = match packed {
                true => layers.iter().map(|layer| compress("gzip", layer)).collect(),
                false => layers.clone(),
            };
            layout.add_image("", &layers);
            let told = assert_format_refused(&draconis, &layout.source_spec(""), &[]);
            // A gzip file inside a gzip file is not an archive.
            assert!(told.contains(said), "{said}: {told}");
        }
    }
    assert_eq!(std::fs::read(draconis.path("outside")).unwrap(), b"outside");
}

#[test]
fn links_cannot_leave_tree() {
    let draconis = Draconis::new();
    let mut layout = OciLayout::new(draconis.path("oci"));
    let out = format!("../../..{}", draconis.dir.path().display());
    layout.add_image(
        "",
        &[
            join_entries(&[
                tar_entry("out", b'2', &out, b""),
                tar_entry("abs", b'2', "/abs2", b""),
            ]),
            join_entries(&[
                tar_entry("out/new", b'0', "", b"evil"),
                tar_entry("abs/new", b'0', "", b"evil"),
            ]),
        ],
    );
    let image = draconis.path("image");
    draconis.run_ok(["format", "--from", &layout.source_spec(""), image.to_str().unwrap()]);
    assert_fsck_clean(&image);
    assert!(!draconis.path("new").exists());
    let inside = format!("{}:{}/new", image.display(), draconis.dir.path().display());
    assert_eq!(draconis.run_ok(["cat", &inside]), "evil");
    assert_eq!(draconis.run_ok(["cat", &format!("{}:/abs2/new", image.display())]), "evil");
}

#[test]
fn decompression_bombs_are_refused() {
    let draconis = Draconis::new();
    let zeros = vec![0; 64 << 20];
    let bomb = compress("gzip", &join_entries(&[tar_entry("zeros", b'0', "", &zeros)]));
    assert!(bomb.len() < 1 << 20);
    let mut layout = OciLayout::new(draconis.path("oci"));
    layout.add_image("", &[bomb]);
    let told = assert_format_refused(&draconis, &layout.source_spec(""), &["--limit", "16M"]);
    assert!(told.contains("unpacks to more than") && told.contains("--limit"), "{told}");
    // Endless names: memory is limited, too.
    let image = draconis.path("image");
    let names = "ulimit -d 2500000; yes | head -c 0; exec \"$0\" format --from - \"$1\"";
    let mut child = Command::new("sh")
        .args(["-c", names, crate::common::program()])
        .arg(&image)
        .stdin(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    // A name of 60,000 bytes, over and over.
    let feeder = std::thread::spawn(move || {
        let value = "x".repeat(60_000);
        for nth in 0..20_000 {
            let text = format!("60030 SCHILY.xattr.user.a={value}\n");
            let text = text.replacen("60030", &text.len().to_string(), 1);
            let records = tar_entry("x", b'x', "", text.as_bytes());
            let all = [records, tar_entry(&format!("f{nth}"), b'0', "", b"")].concat();
            if std::io::Write::write_all(&mut input, &all).is_err() {
                return;
            }
        }
    });
    let output = child.wait_with_output().unwrap();
    feeder.join().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("names and attributes"), "{told}");
}

#[test]
fn invalid_indexes_and_blobs_are_refused() {
    let draconis = Draconis::new();
    let fresh = || {
        let _ = std::fs::remove_dir_all(draconis.path("oci"));
        let mut layout = OciLayout::new(draconis.path("oci"));
        layout.add_image("", &[join_entries(&[tar_entry("file", b'0', "", b"good")])]);
        layout
    };
    let blobs = |layout: &OciLayout| {
        let mut all: Vec<_> = std::fs::read_dir(layout.dir.join("blobs/sha256"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        all.sort();
        all
    };
    let good = fresh();
    let image = draconis.path("image");
    draconis.run_ok(["format", "--from", &good.source_spec(""), image.to_str().unwrap()]);
    std::fs::remove_file(&image).unwrap();
    for nth in 0..blobs(&good).len() {
        let layout = fresh();
        let blob = &blobs(&layout)[nth];
        let mut bytes = std::fs::read(blob).unwrap();
        bytes[3] ^= 1;
        std::fs::write(blob, &bytes).unwrap();
        let told = assert_format_refused(&draconis, &layout.source_spec(""), &[]);
        assert!(told.contains("digest"), "{told}");
        bytes.push(0);
        std::fs::write(blob, &bytes).unwrap();
        let told = assert_format_refused(&draconis, &layout.source_spec(""), &[]);
        assert!(told.contains("should have"), "{told}");
        std::fs::remove_file(blob).unwrap();
        let told = assert_format_refused(&draconis, &layout.source_spec(""), &[]);
        assert!(told.contains("missing"), "{told}");
    }
    for (index, said) in [
        ("", "index.json"),
        ("{}", "no image"),
        ("[]", "no image"),
        (r#"{"manifests":[{"digest":"sha256:../../../outside","size":1}]}"#, "digest"),
        (r#"{"manifests":[{"digest":"md5:00","size":1}]}"#, "sha256"),
    ] {
        let layout = fresh();
        std::fs::write(layout.dir.join("index.json"), index).unwrap();
        let told = assert_format_refused(&draconis, &layout.source_spec(""), &[]);
        assert!(told.contains(said), "{said}: {told}");
    }
    let mut layout = fresh();
    let mut inner = layout.add_blob("index.v1+json", br#"{"schemaVersion":2,"manifests":[]}"#);
    for _ in 0..8 {
        let text = format!(r#"{{"schemaVersion":2,"manifests":[{inner}}}]}}"#);
        inner = layout.add_blob("index.v1+json", text.as_bytes());
    }
    layout.manifests.clear();
    layout.add_to_index(&inner, "");
    assert!(assert_format_refused(&draconis, &layout.source_spec(""), &[]).contains("no manifest"));
    for (origin, said) in [
        (format!("oci:{}", draconis.path("nothing").display()), "not a directory"),
        (format!("oci-archive:{}", draconis.path("nothing").display()), "No such file"),
        (format!("docker-archive:{}", layout.dir.join("index.json").display()), "not a tar"),
        (format!("oci:{}", draconis.make_dir("empty").display()), "not an OCI image"),
    ] {
        let told = assert_format_refused(&draconis, &origin, &[]);
        assert!(told.contains(said), "{told}");
    }
}
