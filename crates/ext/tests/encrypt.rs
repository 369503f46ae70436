//! Encrypted trees without their key, compared with the kernel, which made them with its test key.

use crate::common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::common::Image;
use crate::common::compare::{self, ReferenceTree};
use draconis_ext::{Access, Cookie, Error, InodeNumber};
use draconis_types::{FileType, Refusal};

/// With this option the kernel encrypts all new files of a mount.
const DUMMY_KEY_MOUNT_OPTIONS: &str = "loop,test_dummy_encryption=v2";

fn fill(root: &Path) {
    fs::write(root.join("file at the top"), b"contents").unwrap();
    let dir = root.join("directory");
    fs::create_dir(&dir).unwrap();
    for len in [1, 15, 16, 17, 100, 148, 149, 150, 160, 200, 255] {
        fs::write(dir.join("n".repeat(len)), "x".repeat(len * 10)).unwrap();
    }
    for len in [1, 14, 15, 16, 17, 30, 56, 57, 58, 59, 60, 61, 140, 150, 151, 300, 900] {
        symlink("t".repeat(len), dir.join(format!("link {len}"))).unwrap();
    }
    fs::create_dir(dir.join("below")).unwrap();
    fs::write(dir.join("below/empty"), b"").unwrap();
    let many = root.join("many");
    fs::create_dir(&many).unwrap();
    for nth in 0..600 {
        fs::write(many.join(format!("{nth} {}", "m".repeat(nth % 200))), b"").unwrap();
    }
    let few = root.join("few");
    fs::create_dir(&few).unwrap();
    for nth in 0..5 {
        fs::write(few.join(nth.to_string()), b"").unwrap();
    }
}

/// Makes an image with an encrypted tree; `None`, with a message, if the kernel cannot.
fn make_encrypted_image(inode_bytes: &str, hash: &str, features: &str) -> Option<Image> {
    let features = format!("encrypt,^has_journal{features}");
    let arguments = ["-t", "ext4", "-b", "1024", "-I", inode_bytes, "-O", &features];
    let image = Image::make(None, "24M", &arguments)?;
    common::run_tool("tune2fs", &["-E", &format!("hash_alg={hash}"), image.path()])?;
    fill(image.mount_with(DUMMY_KEY_MOUNT_OPTIONS)?.path());
    common::run_tool("e2fsck", &["-fn", image.path()])?;
    Some(image)
}

#[test]
fn no_key_names_targets_and_sizes_match_kernel() {
    let makes = [
        ("256", "half_md4", ""),
        ("256", "tea", ",^metadata_csum"),
        ("128", "legacy", ",^extent,^64bit"),
        ("256", "half_md4", ",^dir_index"),
        ("512", "half_md4", ",inline_data"),
    ];
    for (inode_bytes, hash, features) in makes {
        let Some(image) = make_encrypted_image(inode_bytes, hash, features) else { return };
        let (volume, Some(mount)) = (image.open(), image.mount()) else { return };
        let names =
            compare::compare_trees(&volume, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount);
        assert!(names > 600, "{names}");
        let top = volume.lookup(volume.root(), b"file at the top").unwrap();
        let refused = volume.read(top, 0, 10).unwrap_err();
        assert_eq!((refused.clone(), refused.refusal()), (Error::NoKey, Refusal::NoKey));
        let reading = Access { read: true, write: false, append: false };
        assert_eq!(volume.check_open(top, reading), Err(Error::NoKey));
        let dir = volume.lookup(volume.root(), b"directory").unwrap();
        assert_eq!(volume.check_open(dir, reading), Ok(()));
    }
}

#[test]
fn no_key_names_are_found_only_as_listed() {
    let Some(image) = make_encrypted_image("256", "half_md4", "") else { return };
    let volume = image.open();
    let many = volume.lookup(volume.root(), b"many").unwrap();
    let names = compare::list_names(&volume, many);
    assert_eq!(names.len(), 600);
    for (name, number) in &names {
        assert_eq!(volume.lookup(many, name), Ok(*number));
        let mut other = name.clone();
        let last = other.len() / 2;
        other[last] = if other[last] == b'A' { b'B' } else { b'A' };
        assert_eq!(volume.lookup(many, &other), Err(Error::NotFound));
        assert_eq!(volume.lookup(many, &name[..name.len() - 1]), Err(Error::NotFound));
    }
    for name in [&b"0 "[..], b"many", b"...", &[b'A'; 255]] {
        assert_eq!(volume.lookup(many, name), Err(Error::NotFound));
    }
    assert_eq!(volume.lookup(many, b"."), Ok(many));
    assert_eq!(volume.lookup(many, b".."), Ok(volume.root()));
}

#[test]
fn casefolded_encrypted_directory_lists_stored_hashes() {
    let features = ",^extent,^64bit,^metadata_csum";
    let Some(image) = make_encrypted_image("256", "half_md4", features) else { return };
    // Few kernels have the Unicode tables, so the test adds the feature, the flag and the two
    // hashes behind each name.
    let dir = image.open().lookup(InodeNumber::ROOT, b"few").unwrap();
    let block = {
        let volume = image.open();
        volume.first_block(&volume.inode(dir).unwrap()).unwrap()
    };
    let plain = compare::list_names(&image.open(), dir);
    let mut bytes = fs::read(&image.path).unwrap();
    let start = block.0 as usize * 1024;
    let mut at = start;
    let mut entries = Vec::new();
    while at < start + 1024 {
        let len = usize::from(u16::from_le_bytes([bytes[at + 4], bytes[at + 5]]));
        let name_len = usize::from(bytes[at + 6]);
        entries.push((bytes[at..at + 8].to_vec(), bytes[at + 8..at + 8 + name_len].to_vec()));
        at += len;
    }
    let mut packed = Vec::new();
    let mut last = 0;
    for (nth, (head, name)) in entries.iter().enumerate() {
        last = packed.len();
        packed.extend(head);
        packed.extend(name);
        packed.resize(packed.len().next_multiple_of(4), 0);
        packed.extend((nth as u32 * 2).to_le_bytes());
        packed.extend(7u32.to_le_bytes());
        let len = (packed.len() - last) as u16;
        packed[last + 4..last + 6].copy_from_slice(&len.to_le_bytes());
    }
    let rest = (1024 - last) as u16;
    packed[last + 4..last + 6].copy_from_slice(&rest.to_le_bytes());
    packed.resize(1024, 0);
    bytes[start..start + 1024].copy_from_slice(&packed);
    let image = Image::from_bytes(&bytes);
    image.debugfs_write("feature casefold");
    image.debugfs_write(&format!("set_inode_field <{dir}> flags 0x40000800"));
    image.debugfs_write("set_super_value encoding 1");
    let volume = image.open();
    let folded = compare::list_names(&volume, dir);
    assert_eq!(folded.len(), plain.len());
    for ((name, number), (_, other)) in folded.iter().zip(&plain) {
        assert_eq!(volume.lookup(dir, name), Ok(*number));
        assert!(plain.values().any(|it| it == number) && folded.values().any(|it| it == other));
        // Last byte of the first hash, and two bytes of the second.
        assert_eq!(&name[4..8], b"AAcA", "{}", name.escape_ascii());
    }
    let mut kinds = Vec::new();
    let visit = |entry: Result<draconis_ext::Entry<'_>, _>| {
        kinds.push(entry.unwrap().kind);
        true
    };
    volume.entries(dir, Cookie::default(), false, visit).unwrap();
    assert_eq!(kinds, vec![Some(FileType::File); 5]);
}
