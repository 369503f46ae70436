//! Unusual but valid images and archives, as some programs write them.

use crate::common::Draconis;
use crate::oci::build::{OciLayout, sha256};
use crate::oci::hostile::{assert_format_refused, join_entries, tar_entry, tar_entry_with_size};
use draconis_testkit::judge::{assert_fsck_clean, debugfs};

/// Returns pax records.
fn pax_records(records: &[(&str, &str)]) -> Vec<u8> {
    let mut all = String::new();
    for (key, value) in records {
        let rest = format!(" {key}={value}\n");
        let mut lens = (1..5).map(|digits| rest.len() + digits);
        let len = lens.find(|len| len.to_string().len() + rest.len() == *len).unwrap();
        all += &format!("{len}{rest}");
    }
    tar_entry("pax", b'x', "", all.as_bytes())
}

/// Creates a volume from an archive, and returns its names.
fn format_and_list_names(draconis: &Draconis, origin: &str) -> String {
    let image = draconis.path("odd.img");
    draconis.run_ok(["format", "--force", "--from", origin, image.to_str().unwrap()]);
    assert_fsck_clean(&image);
    let names = draconis.run_ok(["ls", image.to_str().unwrap()]);
    names.split_whitespace().filter(|name| !name.contains("lost")).collect::<Vec<_>>().join(" ")
}

#[test]
fn sizes_of_non_files_are_ignored() {
    let draconis = Draconis::new();
    let tar = draconis.path("odd.tar");
    let file = || tar_entry("file", b'0', "", b"contents");
    let cases: [(Vec<u8>, &str); 6] = [
        (tar_entry_with_size("d/", b'5', "", 4096, b""), "d"),
        (tar_entry_with_size("d", b'2', "there", 9, b""), "d"),
        (tar_entry_with_size("d", b'6', "", 9, b""), "d"),
        // With and without the contents of the link's target.
        (tar_entry_with_size("d", b'1', "file", 8, b""), "d"),
        (tar_entry_with_size("d", b'1', "file", 8, b"contents"), "d"),
        // A file listed twice is a hard link to itself.
        (tar_entry_with_size("file", b'1', "file", 0, b""), ""),
    ];
    for (odd, name) in cases {
        let last = tar_entry("last", b'0', "", b"end");
        std::fs::write(&tar, join_entries(&[file(), odd, last])).unwrap();
        let expected = [name, "file last"].join(" ");
        assert_eq!(format_and_list_names(&draconis, tar.to_str().unwrap()), expected.trim());
        let image = draconis.path("odd.img");
        let shown = image.to_str().unwrap();
        assert_eq!(draconis.run_ok(["cat", &format!("{shown}:/file")]), "contents");
        assert_eq!(draconis.run_ok(["cat", &format!("{shown}:/last")]), "end");
    }
}

#[test]
fn libarchive_xattrs_are_imported() {
    let draconis = Draconis::new();
    let tar = draconis.path("odd.tar");
    let records = [("LIBARCHIVE.xattr.user.a%20b", "dmFsdWU"), ("SCHILY.xattr.user.c", "v")];
    std::fs::write(&tar, join_entries(&[pax_records(&records), tar_entry("x", b'0', "", b"")]))
        .unwrap();
    format_and_list_names(&draconis, tar.to_str().unwrap());
    let said = debugfs(draconis.path("odd.img"), "ea_list /x");
    assert!(said.contains("user.a b (5) = \"value\"") && said.contains("user.c (1)"), "{said}");
    let wrong = [("LIBARCHIVE.xattr.user.a", "!")];
    std::fs::write(&tar, join_entries(&[pax_records(&wrong), tar_entry("x", b'0', "", b"")]))
        .unwrap();
    let said = assert_format_refused(&draconis, tar.to_str().unwrap(), &[]);
    assert!(said.contains("x: the attribute user.a"), "{said}");
}

#[test]
fn invalid_numbers_are_reported_with_file() {
    let draconis = Draconis::new();
    let tar = draconis.path("odd.tar");
    let cases: [(&[(&str, &str)], &str); 3] = [
        (&[("uid", "nobody")], "x: its uid: \"nobody\" is no number"),
        (&[("size", "-1")], "\"-1\" is no number"),
        (&[("mtime", "soon")], "x: the time soon"),
    ];
    for (records, wanted) in cases {
        std::fs::write(&tar, join_entries(&[pax_records(records), tar_entry("x", b'0', "", b"")]))
            .unwrap();
        let said = assert_format_refused(&draconis, tar.to_str().unwrap(), &[]);
        assert!(said.contains(wanted), "{said}");
    }
}

#[test]
fn non_archives_are_refused_by_name() {
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
            let said = assert_format_refused(&draconis, file.to_str().unwrap(), &[]);
            assert!(said.contains("not a tar archive; it holds"), "{said}");
            assert!(said.contains(wanted), "{said}");
        }
    }
}

#[test]
fn json_null_lists_are_accepted() {
    let draconis = Draconis::new();
    let layout = |name: &str| OciLayout::new(draconis.path(name));
    let config = |layout: &OciLayout| {
        let text = r#"{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":null}}"#;
        layout.add_blob("config.v1+json", text.as_bytes()) + "}"
    };
    let index = |name: &str, text: &str| {
        std::fs::write(draconis.path(name).join("index.json"), text).unwrap();
        format!("oci:{}", draconis.path(name).display())
    };
    let empty = layout("empty");
    let manifest = format!(r#"{{"schemaVersion":2,"config":{},"layers":null}}"#, config(&empty));
    let manifest = empty.add_blob("manifest.v1+json", manifest.as_bytes());
    let manifest = manifest + r#","annotations":null}"#;
    let origin = index("empty", &format!(r#"{{"manifests":[{manifest}]}}"#));
    assert_eq!(format_and_list_names(&draconis, &origin), "");
    layout("none");
    let said = assert_format_refused(&draconis, &index("none", r#"{"manifests":null}"#), &[]);
    assert!(said.contains("the index has no image"), "{said}");

    let text = br#"{"os":"linux","architecture":"amd64","rootfs":{"diff_ids":null}}"#;
    let name = format!("{}.json", sha256(text));
    let list = format!(r#"[{{"Config":"{name}","RepoTags":null,"Layers":null}}]"#);
    let tar = draconis.path("scratch.tar");
    let saved =
        [tar_entry("manifest.json", b'0', "", list.as_bytes()), tar_entry(&name, b'0', "", text)];
    std::fs::write(&tar, join_entries(&saved)).unwrap();
    assert_eq!(format_and_list_names(&draconis, &format!("docker-archive:{}", tar.display())), "");
    std::fs::write(&tar, join_entries(&[tar_entry("manifest.json", b'0', "", b"[]")])).unwrap();
    let said = assert_format_refused(&draconis, &format!("docker-archive:{}", tar.display()), &[]);
    assert!(said.contains("manifest.json names no image"), "{said}");
}

#[test]
fn foreign_layers_are_refused_with_url() {
    let draconis = Draconis::new();
    let mut layout = OciLayout::new(draconis.path("layout"));
    let digest = format!("sha256:{}", "0".repeat(64));
    let config = layout.add_blob("config.v1+json", b"{}") + "}";
    let kind = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip";
    let layer = format!(
        r#"{{"mediaType":"{kind}","digest":"{digest}","size":5,"urls":["https://there"]}}"#
    );
    let manifest = format!(r#"{{"schemaVersion":2,"config":{config},"layers":[{layer}]}}"#);
    let manifest = layout.add_blob("manifest.v1+json", manifest.as_bytes());
    layout.add_to_index(&manifest, "one");
    let said = assert_format_refused(&draconis, &layout.source_spec("one"), &[]);
    assert!(said.contains("may not be handed on and is at https://there: download it"), "{said}");
}

/// An image without its prefix is a tree of files; a note says so.
#[test]
fn image_given_as_file_is_reported() {
    let draconis = Draconis::new();
    let mut layout = OciLayout::new(draconis.path("image"));
    layout.add_image("one", &[join_entries(&[tar_entry("x", b'0', "", b"")])]);
    let tar = draconis.path("image.tar");
    crate::oci::build::create_tar(&draconis.path("image"), &tar, &[]);
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
