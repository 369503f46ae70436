//! Changes of volumes with small ext4 features: permitted operations and refusals.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use crate::common::storm::write_options;
use crate::common::{DIRECTORY, FILE, close_and_fsck};
use crate::common::{HASH_SEED, Image, compare, report_skipped, run_tool, tree};
use draconis_device::{MemoryDisk, Random};
use draconis_ext::format::inode::flags;
use draconis_ext::{
    Access, Error, Follow, InodeNumber, OpenOptions, RenameMode, Reserve, Volume, XattrSet,
};
use draconis_types::{AttributeChange, FileType, Refusal};

fn disk_of_image(image: &Image) -> Arc<MemoryDisk> {
    image.memory_disk()
}

fn open_for_writing(disk: &Arc<MemoryDisk>) -> Volume {
    Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap()
}

fn inode_number(volume: &Volume, path: &str) -> InodeNumber {
    volume.resolve(volume.root(), path.as_bytes(), Follow::No).unwrap()
}

/// Sets or clears flags, as `chattr` does.
fn change_flags(volume: &Volume, inode: InodeNumber, which: u32, on: bool) -> Result<(), Error> {
    let had = volume.attributes(inode).unwrap().flags;
    volume.set_flags(inode, if on { had | which } else { had & !which })
}

fn truncate_to(to: u64) -> AttributeChange {
    AttributeChange { size_bytes: Some(to), ..AttributeChange::default() }
}

#[test]
fn verity_file_is_immutable_and_fully_deleted() {
    let source = tempfile::tempdir().unwrap();
    fs::write(source.path().join("sealed"), tree::random_bytes(1, 10 << 10)).unwrap();
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "verity"];
    let Some(image) = Image::make(Some(source.path()), "8M", &arguments) else { return };
    let all =
        image.open().inode(inode_number(&image.open(), "/sealed")).unwrap().flags | flags::VERITY;
    image.debugfs_write(&format!("set_inode_field sealed flags {all:#x}"));
    image.debugfs_write("set_inode_field sealed size 2500");
    let disk = disk_of_image(&image);
    let volume = open_for_writing(&disk);
    let sealed = inode_number(&volume, "/sealed");
    let access = Access { read: true, write: true, append: false };
    assert_eq!(volume.check_open(sealed, access), Err(Error::NotPermitted));
    assert_eq!(volume.write(sealed, 0, b"x"), Err(Error::NotPermitted));
    assert_eq!(volume.set_attributes(sealed, &truncate_to(0)).map(drop), Err(Error::NotPermitted));
    for how in [Reserve::Allocate, Reserve::PunchHole] {
        assert_eq!(volume.fallocate(sealed, 0, 4096, how), Err(Error::NotPermitted));
    }
    let mode = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
    volume.set_attributes(sealed, &mode).unwrap();
    volume.set_xattr(sealed, b"user.a", b"value", XattrSet::Any, false).unwrap();
    volume.link(sealed, volume.root(), b"again").unwrap();
    let before = volume.space().free_blocks;
    volume.unlink(volume.root(), b"sealed").unwrap();
    volume.unlink(volume.root(), b"again").unwrap();
    // All of it, including the Merkle tree behind its end.
    assert!(volume.space().free_blocks >= before + 10);
    close_and_fsck(volume, disk);
}

#[test]
fn project_ids_are_inherited_and_enforced() {
    let arguments = ["-t", "ext4", "-I", "256", "-O", "project"];
    let Some(image) = Image::make(None, "8M", &arguments) else { return };
    image.debugfs_write("feature ^quota");
    let disk = disk_of_image(&image);
    let volume = open_for_writing(&disk);
    let root = volume.root();
    let dir = volume.create(root, b"project", &DIRECTORY).unwrap();
    let before = volume.create(dir, b"before", &FILE).unwrap();
    volume.set_project(dir, 77_000).unwrap();
    change_flags(&volume, dir, flags::PROJECT, true).unwrap();
    let inside = volume.create(dir, b"inside", &FILE).unwrap();
    let below = volume.create(dir, b"below", &DIRECTORY).unwrap();
    let outside = volume.create(root, b"outside", &FILE).unwrap();
    let project = |inode| volume.inode(inode).unwrap().project();
    assert_eq!([before, inside, below, outside].map(project), [0, 77_000, 77_000, 0]);
    assert_ne!(volume.inode(below).unwrap().flags & flags::PROJECT, 0);
    assert_eq!(volume.inode(inside).unwrap().flags & flags::PROJECT, 0);
    assert_eq!(Error::OtherProject.refusal(), Refusal::CrossVolume);
    let other = Err(Error::OtherProject);
    assert_eq!(volume.link(outside, dir, b"linked"), other);
    let how = [RenameMode::Replace, RenameMode::NoReplace];
    for how in how {
        assert_eq!(volume.rename(root, b"outside", dir, b"moved", how), other);
    }
    let exchange = RenameMode::Exchange;
    assert_eq!(volume.rename(root, b"outside", dir, b"inside", exchange), other);
    assert_eq!(volume.rename(dir, b"inside", root, b"outside", exchange), other);
    assert_eq!(volume.rename(dir, b"before", dir, b"renamed", RenameMode::Replace), other);
    volume.rename(dir, b"inside", root, b"gone", RenameMode::Replace).unwrap();
    volume.rename(root, b"gone", dir, b"back", RenameMode::Replace).unwrap();
    volume.set_project(outside, 77_000).unwrap();
    volume.link(outside, dir, b"linked").unwrap();
    close_and_fsck(volume, disk);

    let Some(image) = Image::make(None, "8M", &["-t", "ext2", "-I", "256"]) else { return };
    let disk = self::disk_of_image(&image);
    let volume = open_for_writing(&disk);
    assert!(matches!(volume.set_project(volume.root(), 1), Err(Error::Unsupported { .. })));
    close_and_fsck(volume, disk);
}

/// Makes an image with inline files and directories, filled by the kernel.
fn make_inline_data_image(
    size: &str,
    arguments: &[&str],
    fill: impl FnOnce(&Path),
) -> Option<Image> {
    let mut all = vec!["-t", "ext4", "-O", "inline_data,^has_journal"];
    all.extend(arguments);
    let image = Image::make(None, size, &all)?;
    fill(image.mount_writable()?.path());
    Some(image)
}

#[test]
fn inline_data_moves_to_blocks_only_with_free_space() {
    let filled = make_inline_data_image("1M", &["-b", "1024", "-m", "0"], |root| {
        fs::write(root.join("file"), tree::random_bytes(1, 100)).unwrap();
        rustix::fs::setxattr(
            root.join("file"),
            "user.a",
            b"beside",
            rustix::fs::XattrFlags::empty(),
        )
        .unwrap();
        fs::create_dir(root.join("dir")).unwrap();
        for name in ["one", "two", "three", "four"] {
            fs::write(root.join("dir").join(name), name).unwrap();
        }
    });
    let Some(image) = filled else { return };
    let disk = disk_of_image(&image);
    let volume = open_for_writing(&disk);
    let (file, dir) = (inode_number(&volume, "/file"), inode_number(&volume, "/dir"));
    let full = volume.create(volume.root(), b"full", &FILE).unwrap();
    let mut at = 0;
    while let Ok(taken @ 1..) = volume.write(full, at, &[7; 1024]) {
        at += taken as u64;
    }
    // The space left where a map could not grow.
    for nth in 0..20 {
        if let Ok(small) = volume.create(volume.root(), format!("{nth}").as_bytes(), &FILE) {
            let _ = volume.write(small, 0, b"x");
        }
    }
    for inode in [file, dir] {
        assert!(volume.inode(inode).unwrap().is_inline());
    }
    assert_eq!(volume.write(file, 0, b"x"), Err(Error::NoSpace));
    assert_eq!(volume.set_attributes(file, &truncate_to(50)).map(drop), Err(Error::NoSpace));
    assert_eq!(volume.create(dir, b"five", &FILE), Err(Error::NoSpace));
    assert!(volume.inode(file).unwrap().is_inline() && volume.inode(dir).unwrap().is_inline());
    assert_eq!(volume.read(file, 0, 200).unwrap()[..], tree::random_bytes(1, 100));
    // Names can be removed and replaced on a full volume.
    volume.unlink(dir, b"one").unwrap();
    volume.unlink(dir, b"four").unwrap();
    volume.rename(dir, b"two", dir, b"three", RenameMode::Replace).unwrap();
    assert_eq!(compare::list_names(&volume, dir).len(), 1);
    assert!(volume.inode(dir).unwrap().is_inline());
    // An empty file needs no block.
    volume.set_attributes(file, &truncate_to(0)).unwrap();
    assert!(!volume.inode(file).unwrap().is_inline());
    assert_eq!(volume.xattr(file, b"user.a").unwrap(), b"beside");
    volume.unlink(volume.root(), b"full").unwrap();
    volume.commit().unwrap();
    volume.create(dir, b"five", &DIRECTORY).unwrap();
    assert!(!volume.inode(dir).unwrap().is_inline());
    assert_eq!(volume.lookup(dir, b".."), Ok(volume.root()));
    let how = XattrSet::Any;
    let refused = volume.set_xattr(file, b"system.data", b"x", how, false);
    assert!(matches!(refused, Err(Error::Unsupported { .. })));
    close_and_fsck(volume, disk);
}

#[test]
fn hole_in_inline_data_reads_as_zeros() {
    let filled = make_inline_data_image("8M", &["-b", "1024"], |root| {
        for name in ["hole", "zeros", "long", "grown"] {
            fs::write(root.join(name), tree::random_bytes(1, 100)).unwrap();
        }
    });
    let Some(image) = filled else { return };
    let disk = disk_of_image(&image);
    let volume = open_for_writing(&disk);
    let how = [
        ("/hole", Reserve::PunchHole),
        ("/zeros", Reserve::ZeroRange { keep_size: true }),
        ("/long", Reserve::Allocate),
    ];
    for (path, how) in how {
        assert!(volume.inode(inode_number(&volume, path)).unwrap().is_inline());
        volume.fallocate(inode_number(&volume, path), 20, 5000, how).unwrap();
    }
    volume.set_attributes(inode_number(&volume, "/grown"), &truncate_to(3000)).unwrap();
    let image = close_and_fsck(volume, disk);
    let volume = image.open();
    let mut expected = tree::random_bytes(1, 100);
    let mut long = expected.clone();
    long.resize(5020, 0);
    assert_eq!(volume.read(inode_number(&volume, "/long"), 0, 9000).unwrap()[..], long);
    assert_eq!(volume.read(inode_number(&volume, "/grown"), 0, 9000).unwrap()[..], long[..3000]);
    expected[20..].fill(0);
    for path in ["/hole", "/zeros"] {
        assert_eq!(
            volume.read(inode_number(&volume, path), 0, 200).unwrap()[..],
            expected,
            "{path}"
        );
    }
}

#[test]
fn inline_directory_moves_with_its_parent() {
    let filled = make_inline_data_image("8M", &["-b", "1024"], |root| {
        fs::create_dir_all(root.join("a/moving")).unwrap();
        fs::write(root.join("a/moving/name"), b"x").unwrap();
        fs::create_dir(root.join("b")).unwrap();
    });
    let Some(image) = filled else { return };
    let disk = disk_of_image(&image);
    let volume = open_for_writing(&disk);
    let (a, b) = (inode_number(&volume, "/a"), inode_number(&volume, "/b"));
    let moving = inode_number(&volume, "/a/moving");
    volume.rename(a, b"moving", b, b"moved", RenameMode::Replace).unwrap();
    assert!(volume.inode(moving).unwrap().is_inline());
    assert_eq!(volume.lookup(moving, b".."), Ok(b));
    let below = volume.rename(volume.root(), b"b", moving, b"below", RenameMode::Replace);
    assert!(matches!(below, Err(Error::Misuse(_))));
    assert_eq!(volume.remove_directory(b, b"moved"), Err(Error::NotEmpty));
    volume.unlink(moving, b"name").unwrap();
    volume.remove_directory(b, b"moved").unwrap();
    volume.remove_directory(volume.root(), b"a").unwrap();
    close_and_fsck(volume, disk);
}

/// Returns a name of the model in an equivalent form.
fn equivalent_name(random: &mut Random, name: &str) -> String {
    match random.next_below(3) {
        0 => name.to_uppercase(),
        1 => name.replace('\u{E9}', "e\u{301}"),
        _ => name.to_owned(),
    }
}

#[test]
fn casefold_equal_names_are_one_entry() {
    let makes = [
        ("1024", "casefold", ""),
        ("1024", "casefold,^metadata_csum,^has_journal", ""),
        ("4096", "casefold,^dir_index", ""),
        ("1024", "casefold", ",encoding_flags=strict"),
    ];
    for (seed, (block, features, strict)) in (1..).zip(makes) {
        let extended = format!("{HASH_SEED}{strict}");
        let all = ["-t", "ext4", "-b", block, "-O", features, "-E", &extended];
        let Some(image) = Image::make(None, "16M", &all) else { return };
        let disk = disk_of_image(&image);
        let volume = open_for_writing(&disk);
        let mut random = Random::new(seed);
        let top = volume.create(volume.root(), b"top", &DIRECTORY).unwrap();
        change_flags(&volume, top, flags::CASEFOLD, true).unwrap();
        let dir = volume.create(top, b"Dir", &DIRECTORY).unwrap();
        assert_ne!(volume.inode(dir).unwrap().flags & flags::CASEFOLD, 0);
        assert_eq!(volume.lookup(top, b"dIR"), Ok(dir));
        assert_eq!(change_flags(&volume, top, flags::CASEFOLD, false), Err(Error::NotEmpty));
        let mut model: BTreeMap<String, InodeNumber> = BTreeMap::new();
        let steps = 800;
        for _ in 0..steps {
            let name = format!("\u{E9}t\u{E9} {} {}", random.next_below(250), "n".repeat(20));
            let shown = equivalent_name(&mut random, &name);
            let there = model.get(&name).copied();
            assert_eq!(volume.lookup(dir, shown.as_bytes()).ok(), there, "{shown}");
            match random.next_below(8) {
                0..5 => match volume.create(dir, shown.as_bytes(), &FILE) {
                    Ok(made) => assert!(model.insert(name, made).is_none() && there.is_none()),
                    Err(error) => assert!(error == Error::Exists && there.is_some(), "{error}"),
                },
                5 | 6 => {
                    let unlinked = volume.unlink(dir, shown.as_bytes());
                    assert_eq!(unlinked.is_ok(), model.remove(&name).is_some(), "{shown}");
                }
                _ => {
                    // To another name, or to another form of its own.
                    let to = match random.next_below(2) {
                        0 => name.clone(),
                        _ => format!("\u{E9}t\u{E9} {} {}", random.next_below(250), "n".repeat(20)),
                    };
                    let moved = equivalent_name(&mut random, &to);
                    let how = RenameMode::Replace;
                    let done = volume.rename(dir, shown.as_bytes(), dir, moved.as_bytes(), how);
                    assert_eq!(done.is_ok(), there.is_some(), "{shown} {moved}: {done:?}");
                    if let Some(inode) = model.remove(&name) {
                        model.insert(to, inode);
                    }
                }
            }
        }
        let listed = compare::list_names(&volume, dir);
        let mut found: Vec<_> = listed.values().collect();
        let mut expected: Vec<_> = model.values().collect();
        found.sort();
        expected.sort();
        assert_eq!(found, expected);
        let no_text = b"no text \xFF";
        for dir in [dir, top] {
            let invalid = volume.create(dir, no_text, &FILE);
            if strict.is_empty() {
                assert_eq!(volume.lookup(dir, no_text), invalid);
                assert_eq!(volume.lookup(dir, b"No text \xFF"), Err(Error::NotFound));
            } else {
                assert!(matches!(invalid, Err(Error::Misuse(_))));
            }
        }
        if strict.is_empty() {
            // With an htree, e2fsck 1.47.0 uses the hash of the previous entry for invalid UTF-8.
            volume.unlink(dir, no_text).unwrap();
        }
        let file = volume.create(top, b"file", &FILE).unwrap();
        assert_eq!(change_flags(&volume, file, flags::CASEFOLD, true), Err(Error::NotADirectory));
        let plain = volume.create(volume.root(), b"plain", &DIRECTORY).unwrap();
        change_flags(&volume, plain, flags::CASEFOLD, true).unwrap();
        change_flags(&volume, plain, flags::CASEFOLD, false).unwrap();
        volume.create(plain, b"a", &FILE).unwrap();
        volume.create(plain, b"A", &FILE).unwrap();
        assert_eq!(change_flags(&volume, plain, flags::CASEFOLD, true), Err(Error::NotEmpty));
        close_and_fsck(volume, disk);
    }
}

#[test]
fn without_key_names_can_be_removed_but_not_created() {
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "encrypt"];
    let Some(image) = Image::make(None, "16M", &arguments) else { return };
    {
        let Some(mount) = image.mount_with("loop,test_dummy_encryption=v2") else { return };
        let dir = mount.path().join("dir");
        fs::create_dir_all(dir.join("below")).unwrap();
        for nth in 0..300 {
            fs::write(dir.join(format!("file {nth}")), vec![1; nth * 20]).unwrap();
        }
        std::os::unix::fs::symlink("target", dir.join("link")).unwrap();
    }
    let disk = disk_of_image(&image);
    let volume = open_for_writing(&disk);
    let root = volume.root();
    let dir = compare::list_names(&volume, root).into_iter().find(|(name, inode)| {
        name != b"lost+found" && volume.inode(*inode).unwrap().is_encrypted()
    });
    let Some((dir_name, dir)) = dir else { return report_skipped("the kernel encrypted nothing") };
    let names = compare::list_names(&volume, dir);
    let (name, file) = names
        .iter()
        .find(|(_, inode)| volume.inode(**inode).unwrap().kind == FileType::File)
        .unwrap();
    let plain = volume.create(root, b"plain", &FILE);
    let locked = Err(Error::NoKey);
    assert_eq!(volume.create(dir, b"new", &FILE).map(drop), locked);
    assert_eq!(volume.create(dir, name, &FILE).map(drop), Err(Error::Exists));
    assert_eq!(volume.create_tmpfile(dir, &FILE).map(drop), locked);
    let how = RenameMode::Replace;
    assert_eq!(volume.rename(dir, name, root, b"out", how), locked);
    assert_eq!(volume.rename(dir, name, dir, b"other", how), locked);
    if let Ok(plain) = plain {
        assert_eq!(volume.link(plain, dir, b"in"), locked);
        assert_eq!(volume.rename(root, b"plain", dir, name, how), locked);
    }
    assert_eq!(volume.write(*file, 0, b"x"), Err(Error::NoKey));
    assert_eq!(volume.set_attributes(*file, &truncate_to(0)).map(drop), locked);
    let mode = AttributeChange { mode: Some(0o600), ..AttributeChange::default() };
    volume.set_attributes(*file, &mode).unwrap();
    assert_eq!(volume.unlink(dir, b"file 1"), Err(Error::NotFound));
    let _ = plain;
    for (name, inode) in &names {
        match volume.inode(*inode).unwrap().kind {
            FileType::Directory => volume.remove_directory(dir, name).unwrap(),
            _ => volume.unlink(dir, name).unwrap(),
        }
    }
    volume.remove_directory(root, &dir_name).unwrap();
    close_and_fsck(volume, disk);
}

/// Returns the bytes of a mounted image, as after a power loss.
fn copy_as_after_power_loss(image: &Image, mount: &Path) -> Image {
    rustix::fs::syncfs(File::open(mount).unwrap()).unwrap();
    Image::from_bytes(&fs::read(&image.path).unwrap())
}

#[test]
fn kernel_orphans_are_freed_from_list_and_orphan_file() {
    for features in ["orphan_file", "orphan_file,^metadata_csum", "^orphan_file"] {
        let arguments = ["-t", "ext4", "-b", "1024", "-O", features];
        let Some(image) = Image::make(None, "16M", &arguments) else { return };
        let left = {
            let Some(mount) = image.mount_writable() else { return };
            let held: Vec<File> = (0..20)
                .map(|nth| {
                    let path = mount.path().join(format!("held {nth}"));
                    let mut file = File::create_new(&path).unwrap();
                    file.write_all(&vec![1; nth * 3000]).unwrap();
                    file.sync_all().unwrap();
                    fs::remove_file(&path).unwrap();
                    file
                })
                .collect();
            let left = copy_as_after_power_loss(&image, mount.path());
            drop(held);
            left
        };
        let disk = disk_of_image(&left);
        let volume = open_for_writing(&disk);
        volume.create(volume.root(), b"new", &FILE).unwrap();
        let left = close_and_fsck(volume, disk);
        let said = left.open().info().features;
        assert!(!said.iter().any(|name| name == "orphan_present"), "{said:?}");
        let free = |image: &Image| image.open().space();
        let fresh = free(&image);
        assert_eq!(free(&left).free_inodes + 1, fresh.free_inodes, "{features}");
        let Some(mount) = left.mount_writable() else { return };
        fs::write(mount.path().join("more"), b"by the kernel").unwrap();
        drop(mount);
        assert!(run_tool("e2fsck", &["-fn", left.path()]).is_some());
    }
}

#[test]
fn orphan_list_is_read_beside_orphan_file() {
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "orphan_file"];
    let Some(image) = Image::make(None, "16M", &arguments) else { return };
    let disk = disk_of_image(&image);
    let volume = open_for_writing(&disk);
    let free = volume.space().free_inodes;
    for nth in 0..10 {
        let name = format!("held {nth}");
        let file = volume.create(volume.root(), name.as_bytes(), &FILE).unwrap();
        volume.write(file, 0, &[1; 5000]).unwrap();
        volume.add_user(file);
        volume.sync_inode(file, false).unwrap();
        volume.unlink(volume.root(), name.as_bytes()).unwrap();
    }
    volume.sync().unwrap();
    drop(volume);
    let bytes = Arc::try_unwrap(disk).unwrap().into_bytes();
    let by_e2fsck = Image::from_bytes(&bytes);
    run_tool("e2fsck", &["-y", by_e2fsck.path()]);
    assert!(run_tool("e2fsck", &["-fn", by_e2fsck.path()]).is_some());
    assert_eq!(by_e2fsck.open().space().free_inodes, free);
    let by_the_kernel = Image::from_bytes(&bytes);
    let Some(mount) = by_the_kernel.mount_writable() else { return };
    drop(mount);
    assert!(run_tool("e2fsck", &["-fn", by_the_kernel.path()]).is_some());
    assert_eq!(by_the_kernel.open().space().free_inodes, free);
}

#[test]
fn damaged_orphan_file_harms_nothing_else() {
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "orphan_file"];
    let Some(image) = Image::make(None, "8M", &arguments) else { return };
    let stat = image.debugfs("stats").unwrap();
    let line = stat.lines().find(|line| line.contains("rphan file inode")).unwrap();
    let file: u32 = line.split_whitespace().last().unwrap().parse().unwrap();
    let volume = image.open();
    let block = volume.first_block(&volume.inode(InodeNumber(file)).unwrap()).unwrap();
    image.debugfs_write("feature orphan_present");
    let bytes = fs::read(&image.path).unwrap();
    let at = block.0 as usize * 1024;
    let mut random = Random::new(5);
    let (mut taken, mut refused) = (0, 0);
    for nth in 0..60 {
        let mut spoilt = bytes.clone();
        for _ in 0..=random.next_below(6) {
            let place = if nth % 2 == 0 {
                at + 1016 + random.next_below(8) as usize
            } else {
                at + random.next_below(1024) as usize
            };
            spoilt[place] = random.next_below(256) as u8;
        }
        let image = Image::from_bytes(&spoilt);
        let opened = Volume::open_for_writing(
            self::disk_of_image(&image),
            OpenOptions::default(),
            write_options(),
        );
        match opened {
            Ok(_) => taken += 1,
            Err(Error::Corrupt { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
        assert!(image.try_open().is_ok());
    }
    assert!(refused > 20 && taken + refused == 60, "{refused}");
    // The original, and any listed number without checksums.
    for listed in [0u32, 1, 2, 8, file, 5000, u32::MAX] {
        let image = Image::from_bytes(&bytes);
        image.debugfs_write("feature ^metadata_csum");
        let mut bytes = fs::read(&image.path).unwrap();
        bytes[at + 4..at + 8].copy_from_slice(&listed.to_le_bytes());
        let image = Image::from_bytes(&bytes);
        let _ = Volume::open_for_writing(
            self::disk_of_image(&image),
            OpenOptions::default(),
            write_options(),
        );
    }
}

/// `e2fsck` counts the references to each EA inode.
#[test]
fn ea_inodes_are_refcounted_and_freed() {
    let arguments = ["-t", "ext4", "-b", "1024", "-I", "256", "-O", "ea_inode"];
    let Some(image) = Image::make(None, "16M", &arguments) else { return };
    {
        // The kernel shares EA inodes, and xattr blocks that refer to them.
        let Some(mount) = image.mount_writable() else { return };
        for nth in 0..6 {
            let file = mount.path().join(format!("f{nth}"));
            fs::write(&file, b"").unwrap();
            for (name, len) in [("user.large", 30_000), ("user.other", 5000), ("user.s", 200)] {
                let value = tree::random_bytes(len as u64, len);
                let how = rustix::fs::XattrFlags::empty();
                rustix::fs::setxattr(&file, name, &value, how).unwrap();
            }
        }
    }
    let disk = disk_of_image(&image);
    let volume = open_for_writing(&disk);
    let free = volume.space();
    let file = |nth: u32| inode_number(&volume, &format!("/f{nth}"));
    let set = |inode, name: &[u8], value: &[u8]| {
        volume.set_xattr(inode, name, value, XattrSet::Any, false)
    };
    set(file(0), b"user.new", b"small").unwrap();
    set(file(1), b"user.large", b"no longer").unwrap();
    volume.remove_xattr(file(2), b"user.large").unwrap();
    volume.unlink(volume.root(), b"f3").unwrap();
    set(file(4), b"user.mine", &tree::random_bytes(1, 65_536)).unwrap();
    assert_eq!(set(file(4), b"user.more", &tree::random_bytes(1, 65_537)), Err(Error::TooLarge));
    let large = tree::random_bytes(30_000, 30_000);
    for nth in [0, 4, 5] {
        assert_eq!(volume.xattr(file(nth), b"user.large").unwrap(), large);
    }
    assert_eq!(volume.xattr(file(4), b"user.mine").unwrap(), tree::random_bytes(1, 65_536));
    let image = close_and_fsck(volume, disk);
    {
        let (volume, Some(mount)) = (image.open(), image.mount()) else { return };
        compare::compare_trees(
            &volume,
            InodeNumber::ROOT,
            mount.path(),
            compare::ReferenceTree::Mount,
        );
    }
    let disk = self::disk_of_image(&image);
    let volume = open_for_writing(&disk);
    for nth in [0, 1, 2, 4, 5] {
        volume.unlink(volume.root(), format!("f{nth}").as_bytes()).unwrap();
    }
    volume.commit().unwrap();
    // Every EA inode was deleted with its last reference.
    assert_eq!(volume.space().free_inodes, free.free_inodes + 6 + 2);
    close_and_fsck(volume, disk);
}

#[test]
fn volume_with_mmp_is_written_only_by_claiming_host() {
    let Some(image) = Image::make(None, "8M", &["-t", "ext4", "-O", "mmp"]) else { return };
    assert!(image.try_open().is_ok());
    let disk = disk_of_image(&image);
    let refused = Volume::open_for_writing(disk, OpenOptions::default(), write_options()).map(drop);
    let Err(Error::Unsupported { feature }) = refused else { panic!("{refused:?}") };
    assert!(
        feature.starts_with("writing needs: mmp; a mount can") && feature.contains("-O ^mmp"),
        "{feature}"
    );
    run_tool("tune2fs", &["-O", "^mmp", image.path()]);
    let disk = self::disk_of_image(&image);
    close_and_fsck(open_for_writing(&disk), disk);
}
