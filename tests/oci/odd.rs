//! Unusual but valid images and archives, as some programs write them.

use std::process::Command;

use crate::build::{Layout, ran, sha256};
use crate::check;
use crate::common::Draconis;
use crate::hostile::{archive, entry, refused, sized};

/// Returns pax records.
fn pax(records: &[(&str, &str)]) -> Vec<u8> {
    let mut all = String::new();
    for (key, value) in records {
        let rest = format!(" {key}={value}\n");
        let mut lens = (1..5).map(|digits| rest.len() + digits);
        let len = lens.find(|len| len.to_string().len() + rest.len() == *len).unwrap();
        all += &format!("{len}{rest}");
    }
    entry("pax", b'x', "", all.as_bytes())
}

/// Creates a volume from an archive, and returns its names.
fn names(draconis: &Draconis, origin: &str) -> String {
    let image = draconis.path("odd.img");
    draconis.ok(["format", "--force", "--from", origin, image.to_str().unwrap()]);
    check(&image);
    let names = draconis.ok(["ls", image.to_str().unwrap()]);
    names.split_whitespace().filter(|name| !name.contains("lost")).collect::<Vec<_>>().join(" ")
}

#[test]
fn lengths_of_what_has_no_contents_mean_nothing() {
    let draconis = Draconis::new();
    let tar = draconis.path("odd.tar");
    let file = || entry("file", b'0', "", b"contents");
    let cases: [(Vec<u8>, &str); 6] = [
        (sized("d/", b'5', "", 4096, b""), "d"),
        (sized("d", b'2', "there", 9, b""), "d"),
        (sized("d", b'6', "", 9, b""), "d"),
        // With and without the contents of the link's target.
        (sized("d", b'1', "file", 8, b""), "d"),
        (sized("d", b'1', "file", 8, b"contents"), "d"),
        // A file listed twice is a hard link to itself.
        (sized("file", b'1', "file", 0, b""), ""),
    ];
    for (odd, name) in cases {
        let last = entry("last", b'0', "", b"end");
        std::fs::write(&tar, archive(&[file(), odd, last])).unwrap();
        let expected = [name, "file last"].join(" ");
        assert_eq!(names(&draconis, tar.to_str().unwrap()), expected.trim());
        let image = draconis.path("odd.img");
        let shown = image.to_str().unwrap();
        assert_eq!(draconis.ok(["cat", &format!("{shown}:/file")]), "contents");
        assert_eq!(draconis.ok(["cat", &format!("{shown}:/last")]), "end");
    }
}

#[test]
fn attributes_of_libarchive_are_taken() {
    let draconis = Draconis::new();
    let tar = draconis.path("odd.tar");
    let records = [("LIBARCHIVE.xattr.user.a%20b", "dmFsdWU"), ("SCHILY.xattr.user.c", "v")];
    std::fs::write(&tar, archive(&[pax(&records), entry("x", b'0', "", b"")])).unwrap();
    names(&draconis, tar.to_str().unwrap());
    let listing = ["-R", "ea_list /x"];
    let said = ran(Command::new("debugfs").args(listing).arg(draconis.path("odd.img")));
    let said = String::from_utf8_lossy(&said);
    assert!(said.contains("user.a b (5) = \"value\"") && said.contains("user.c (1)"), "{said}");
    let wrong = [("LIBARCHIVE.xattr.user.a", "!")];
    std::fs::write(&tar, archive(&[pax(&wrong), entry("x", b'0', "", b"")])).unwrap();
    let said = refused(&draconis, tar.to_str().unwrap(), &[]);
    assert!(said.contains("x: the attribute user.a"), "{said}");
}

#[test]
fn numbers_that_are_none_are_named_with_their_file() {
    let draconis = Draconis::new();
    let tar = draconis.path("odd.tar");
    let cases: [(&[(&str, &str)], &str); 3] = [
        (&[("uid", "nobody")], "x: its uid: \"nobody\" is no number"),
        (&[("size", "-1")], "\"-1\" is no number"),
        (&[("mtime", "soon")], "x: the time soon"),
    ];
    for (records, wanted) in cases {
        std::fs::write(&tar, archive(&[pax(records), entry("x", b'0', "", b"")])).unwrap();
        let said = refused(&draconis, tar.to_str().unwrap(), &[]);
        assert!(said.contains(wanted), "{said}");
    }
}

#[test]
fn what_is_no_archive_is_named() {
    let draconis = Draconis::new();
    let file = draconis.path("odd");
    for (bytes, wanted) in [
        (&b"\x04\x22\x4D\x18 short"[..], "something compressed with lz4, and lz4 -d unpacks it"),
        (b"LZIP", "lzip -d"),
        (b"PK\x03\x04", "a ZIP archive"),
        (b"070701", "a cpio archive"),
        (b"!<arch>\ndebian-binary   ", "a Debian package, and dpkg-deb"),
        (b"QFI\xFB", "a QCOW2 disk image"),
    ] {
        for len in [bytes.len(), 4096] {
            let mut bytes = bytes.to_vec();
            bytes.resize(len, b' ');
            std::fs::write(&file, bytes).unwrap();
            let said = refused(&draconis, file.to_str().unwrap(), &[]);
            assert!(said.contains("not a tar archive; it holds"), "{said}");
            assert!(said.contains(wanted), "{said}");
        }
    }
}

#[test]
fn lists_of_nothing_may_be_null() {
    let draconis = Draconis::new();
    let layout = |name: &str| Layout::new(draconis.path(name));
    let config = |layout: &Layout| {
        let text = r#"{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":null}}"#;
        layout.blob("config.v1+json", text.as_bytes()) + "}"
    };
    let index = |name: &str, text: &str| {
        std::fs::write(draconis.path(name).join("index.json"), text).unwrap();
        format!("oci:{}", draconis.path(name).display())
    };
    let empty = layout("empty");
    let manifest = format!(r#"{{"schemaVersion":2,"config":{},"layers":null}}"#, config(&empty));
    let manifest = empty.blob("manifest.v1+json", manifest.as_bytes());
    let manifest = manifest + r#","annotations":null}"#;
    let origin = index("empty", &format!(r#"{{"manifests":[{manifest}]}}"#));
    assert_eq!(names(&draconis, &origin), "");
    layout("none");
    let said = refused(&draconis, &index("none", r#"{"manifests":null}"#), &[]);
    assert!(said.contains("the index has no image"), "{said}");

    let text = br#"{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":null}}"#;
    let name = format!("{}.json", sha256(text));
    let list = format!(r#"[{{"Config":"{name}","RepoTags":null,"Layers":null}}]"#);
    let tar = draconis.path("scratch.tar");
    let saved = [entry("manifest.json", b'0', "", list.as_bytes()), entry(&name, b'0', "", text)];
    std::fs::write(&tar, archive(&saved)).unwrap();
    assert_eq!(names(&draconis, &format!("docker-archive:{}", tar.display())), "");
    std::fs::write(&tar, archive(&[entry("manifest.json", b'0', "", b"[]")])).unwrap();
    let said = refused(&draconis, &format!("docker-archive:{}", tar.display()), &[]);
    assert!(said.contains("manifest.json names no image"), "{said}");
}

#[test]
fn layers_that_are_elsewhere_are_named_with_their_place() {
    let draconis = Draconis::new();
    let mut layout = Layout::new(draconis.path("layout"));
    let digest = format!("sha256:{}", "0".repeat(64));
    let config = layout.blob("config.v1+json", b"{}") + "}";
    let kind = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip";
    let layer = format!(
        r#"{{"mediaType":"{kind}","digest":"{digest}","size":5,"urls":["https://there"]}}"#
    );
    let manifest = format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layer}]}}"#);
    let manifest = layout.blob("manifest.v1+json", manifest.as_bytes());
    layout.list(&manifest, "one");
    let said = refused(&draconis, &layout.origin("one"), &[]);
    assert!(said.contains("may not be handed on and is at https://there: download it"), "{said}");
}

/// An image without its prefix is a tree of files; a note says so.
#[test]
fn images_that_are_taken_as_files_are_told_of() {
    let draconis = Draconis::new();
    let mut layout = Layout::new(draconis.path("image"));
    layout.image("one", &[archive(&[entry("x", b'0', "", b"")])]);
    let tar = draconis.path("image.tar");
    crate::build::tar(&draconis.path("image"), &tar, &[]);
    let image = draconis.path("odd.img");
    for (origin, wanted) in [
        (draconis.path("image"), Some("; oci:")),
        (tar, Some("; oci-archive:")),
        (draconis.path("image").join("blobs"), None),
    ] {
        let origin = origin.to_str().unwrap();
        let line = ["format", "--force", "--from", origin, image.to_str().unwrap()];
        let output = draconis.run(line);
        assert!(output.status.success());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        match wanted {
            Some(wanted) => assert!(said.contains(&format!("{wanted}{origin} takes")), "{said}"),
            None => assert_eq!(said, ""),
        }
    }
}
