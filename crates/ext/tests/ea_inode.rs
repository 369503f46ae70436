//! Attributes in EA inodes, as made by the kernel and `mke2fs`.

use crate::common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::Arc;

use crate::common::compare::{self, ReferenceTree};
use crate::common::storm::write_options;
use crate::common::{Image, tree};
use draconis_device::{Disk, MemoryDisk};
use draconis_ext::check::{CheckOptions, check};
use draconis_ext::{Error, InodeNumber, OpenOptions, Volume, XattrSet};
use draconis_testkit::judge;
use rustix::fs::XattrFlags;

const VALUE_LENGTHS: [usize; 9] = [10, 200, 900, 1024, 3000, 4097, 20_000, 65_535, 65_536];

fn set_xattr(path: &Path, name: &str, value: &[u8]) -> bool {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).is_ok()
}

/// Sets values of all lengths, some of them shared.
fn fill(root: &Path) {
    let all = root.join("all");
    fs::write(&all, b"contents").unwrap();
    for len in VALUE_LENGTHS {
        let name = format!("user.of {len} \u{E9}");
        assert!(set_xattr(&all, &name, &tree::random_bytes(len as u64, len)), "{len}");
    }
    for nth in 0..3 {
        let file = root.join(format!("shared {nth}"));
        fs::write(&file, b"").unwrap();
        assert!(set_xattr(&file, "user.shared", &tree::random_bytes(7, 30_000)));
        // So that they do not share an xattr block, too.
        assert!(set_xattr(&file, "user.own", &[nth]));
    }
    let dir = root.join("directory");
    fs::create_dir(&dir).unwrap();
    assert!(set_xattr(&dir, "user.large", &tree::random_bytes(8, 12_345)));
}

/// Creates short symbolic links with a large value.
fn create_symlinks_with_xattrs(root: &Path) {
    for len in [10, 59, 60, 300] {
        let link = root.join(format!("link {len}"));
        symlink("t".repeat(len), &link).unwrap();
        assert!(set_xattr(&link, "trusted.large", &tree::random_bytes(9, 9000)));
    }
}

fn make_kernel_written_image(features: &str, arguments: &[&str]) -> Option<Image> {
    let features = format!("ea_inode,^has_journal{features}");
    let mut all = vec!["-t", "ext4", "-O", &features];
    all.extend(arguments);
    let image = Image::make(None, "16M", &all)?;
    fill(image.mount_writable()?.path());
    common::run_tool("e2fsck", &["-fn", image.path()])?;
    // e2fsck 1.47.0 mistakes the targets of some for blocks; the kernel decides.
    create_symlinks_with_xattrs(image.mount_writable()?.path());
    Some(image)
}

#[test]
fn kernel_written_ea_inodes_are_read() {
    let makes: [(&str, &[&str]); 5] = [
        ("", &["-b", "1024", "-I", "256"]),
        (",^metadata_csum,^extent,^64bit", &["-b", "1024", "-I", "256"]),
        (",^metadata_csum", &["-b", "4096", "-I", "128"]),
        (",metadata_csum_seed", &["-b", "2048", "-I", "512"]),
        (",inline_data", &["-b", "4096", "-I", "1024"]),
    ];
    for (features, arguments) in makes {
        let Some(image) = make_kernel_written_image(features, arguments) else { return };
        if features.contains("csum_seed") {
            common::run_tool("tune2fs", &["-U", "random", image.path()]);
        }
        let (volume, Some(mount)) = (image.open(), image.mount()) else { return };
        let names =
            compare::compare_trees(&volume, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount);
        assert_eq!(names, 10);
        let value = volume.xattr(inode_number(&volume, b"all"), "user.of 65536 \u{E9}".as_bytes());
        assert_eq!(value, Ok(tree::random_bytes(65_536, 65_536)));
    }
}

fn inode_number(volume: &Volume, name: &[u8]) -> InodeNumber {
    volume.lookup(volume.root(), name).unwrap()
}

/// Returns the EA inodes.
fn list_ea_inodes(volume: &Volume) -> Vec<InodeNumber> {
    let inodes = volume.superblock().inodes;
    let is_value = |number: &InodeNumber| {
        let what = "inode: holds the value of an extended attribute";
        let of_value = Error::Corrupt { what, inode: Some(*number), block: None };
        volume.inode(*number).is_err_and(|error| error == of_value)
    };
    (1..=inodes).map(InodeNumber).filter(is_value).collect()
}

#[test]
fn damaged_ea_inode_affects_only_its_xattr() {
    let features = ",^metadata_csum";
    let Some(image) = make_kernel_written_image(features, &["-b", "1024", "-I", "256"]) else {
        return;
    };
    let volume = image.open();
    let values = list_ea_inodes(&volume);
    // One value is shared.
    assert!(values.len() > 5, "{values:?}");
    let shared = inode_number(&volume, b"shared 0");
    let bytes = fs::read(&image.path).unwrap();
    let pattern = tree::random_bytes(7, 30_000);
    let at = (0..bytes.len()).step_by(1024).find(|at| bytes[*at..].starts_with(&pattern[..1024]));
    let mut spoilt = bytes.clone();
    spoilt[at.unwrap() + 5] ^= 1;
    let wrong = Image::from_bytes(&spoilt).open();
    let what = "extended attribute: hash of its value";
    let damage = Error::Corrupt { what, inode: Some(shared), block: None };
    assert_eq!(wrong.xattr(shared, b"user.shared"), Err(damage));
    assert_eq!(wrong.xattr_names(shared).unwrap().len(), 2);
    assert_eq!(wrong.xattr(shared, b"user.own"), Ok(vec![0]));
    let directory = inode_number(&wrong, b"directory");
    assert_eq!(wrong.xattr(directory, b"user.large"), Ok(tree::random_bytes(8, 12_345)));

    let holder = |image: &Image| {
        let open = image.open();
        let found = values.iter().find(|number| {
            let stat = image.debugfs(&format!("stat <{number}>")).unwrap();
            stat.contains("Size: 30000")
        });
        drop(open);
        *found.unwrap()
    };
    let holder = holder(&image);
    for request in [
        format!("set_inode_field <{holder}> flags 0x80000"),
        format!("set_inode_field <{holder}> size 29999"),
        format!("set_inode_field <{holder}> mode 040644"),
        format!("set_inode_field <{holder}> atime @5"),
        format!("set_inode_field <{holder}> links_count 0"),
    ] {
        let image = Image::from_bytes(&bytes);
        image.debugfs_write(&request);
        let volume = image.open();
        let answer = volume.xattr(shared, b"user.shared");
        assert!(matches!(answer, Err(Error::Corrupt { .. })), "{request}: {answer:?}");
        assert!(volume.read(shared, 0, 1).is_ok());
    }
    let image = Image::from_bytes(&bytes);
    // The flag and the attribute outvote the feature.
    image.debugfs_write("feature ^ea_inode");
    assert_eq!(image.open().xattr(shared, b"user.shared"), Ok(pattern));
}

#[test]
fn mke2fs_written_ea_inodes_are_read() {
    let source = tempfile::tempdir().unwrap();
    let file = source.path().join("file");
    fs::write(&file, b"x").unwrap();
    // About the maximum on most host file systems.
    if !set_xattr(&file, "user.large", &tree::random_bytes(3, 3500)) {
        return common::report_skipped("attributes of 3,500 bytes");
    }
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "ea_inode,^has_journal"];
    let Some(image) = Image::make(Some(source.path()), "8M", &arguments) else { return };
    let volume = image.open();
    compare::compare_trees(&volume, InodeNumber::ROOT, source.path(), ReferenceTree::Source);
    assert_eq!(list_ea_inodes(&volume).len(), 1);
}

/// What Lustre wrote is no damage, to e2fsck and to our check.
#[test]
fn lustre_ea_inodes_are_no_damage() {
    let source = tempfile::tempdir().unwrap();
    fs::write(source.path().join("owner"), b"contents").unwrap();
    fs::write(source.path().join("value"), tree::random_bytes(3, 3000)).unwrap();
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "ea_inode,^has_journal,^metadata_csum"];
    let Some(image) = Image::make(Some(source.path()), "8M", &arguments) else { return };
    let value = source.path().join("value");
    image.debugfs_write(&format!("ea_set -f {} /owner user.one", value.display()));
    let owner = inode_number(&image.open(), b"owner");
    let [value] = list_ea_inodes(&image.open())[..] else { panic!("no value outside") };
    let of_owner = image.debugfs(&format!("stat <{owner}>")).unwrap();
    let word = |after: &str| {
        of_owner.split(after).nth(1).unwrap().split_whitespace().next().unwrap().to_owned()
    };
    // The owner's own: its contents, and the block of attributes if there is one.
    let has_block = !of_owner.contains("File ACL: 0");
    image.debugfs_write(&format!("sif <{owner}> blocks {}", if has_block { 4 } else { 2 }));
    for field in [
        format!("generation {}", word("Generation: ")),
        format!("mtime @{owner}"),
        "ctime @1700000000".to_owned(),
        "atime @1700000000".to_owned(),
        "version 77".to_owned(),
    ] {
        image.debugfs_write(&format!("sif <{value}> {field}"));
    }
    judge::assert_fsck_clean(&image.path);
    let report =
        check(&(image.memory_disk() as Arc<dyn Disk>), CheckOptions::default(), &|_, _| {});
    assert_eq!(report.unwrap().problems, []);
}

/// EA inodes in Lustre's format: they name the owning inode and its generation, and have no
/// reference count.
#[test]
fn lustre_ea_inodes_are_deleted_with_their_owner() {
    let arguments = ["-t", "ext4", "-b", "1024", "-O", "ea_inode,^has_journal,^metadata_csum"];
    let Some(image) = Image::make(None, "8M", &arguments) else { return };
    let Some(mount) = image.mount_writable() else { return };
    let path = mount.path().join("owner");
    fs::write(&path, b"contents").unwrap();
    let names = ["user.one", "user.two"];
    for (name, len) in names.iter().zip([5000, 3000]) {
        assert!(set_xattr(&path, name, &tree::random_bytes(len as u64, len)), "{name}");
    }
    drop(mount);
    let owner = inode_number(&image.open(), b"owner");
    let values = list_ea_inodes(&image.open());
    assert_eq!(values.len(), 2);
    let of_owner = image.debugfs(&format!("stat <{owner}>")).unwrap();
    let generation = of_owner.split("Generation: ").nth(1).unwrap().split_whitespace().next();
    let blocks = of_owner.split("Blockcount: ").nth(1).unwrap().split_whitespace().next();
    let blocks: u32 = blocks.unwrap().parse().unwrap();
    // No owner is charged for their space.
    image.debugfs_write(&format!("set_inode_field <{owner}> blocks {}", blocks - 16));
    for value in &values {
        for field in [
            format!("generation {}", generation.unwrap()),
            format!("mtime @{owner}"),
            "ctime @1700000000".to_owned(),
            "version 77".to_owned(),
            "atime @1".to_owned(),
        ] {
            image.debugfs_write(&format!("set_inode_field <{value}> {field}"));
        }
    }
    let bytes = fs::read(&image.path).unwrap();
    // The owner is deleted; one attribute is removed or replaced; or a rename replaces the file.
    let changes: [fn(&Volume, InodeNumber); 3] = [
        |volume, _| volume.unlink(volume.root(), b"owner").unwrap(),
        |volume, owner| {
            for name in ["user.one", "user.two"] {
                volume.remove_xattr(owner, name.as_bytes()).unwrap();
            }
        },
        |volume, owner| {
            for name in ["user.one", "user.two"] {
                volume.set_xattr(owner, name.as_bytes(), b"short", XattrSet::Any, false).unwrap();
            }
        },
    ];
    for (nth, change) in changes.iter().enumerate() {
        let disk = Arc::new(MemoryDisk::new(bytes.clone(), 512));
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                .unwrap();
        change(&volume, owner);
        volume.close().unwrap();
        drop(volume);
        let after = Image::from_bytes(&Arc::into_inner(disk).unwrap().into_bytes());
        assert!(common::run_tool("e2fsck", &["-fn", after.path()]).is_some(), "{nth}");
        assert_eq!(self::list_ea_inodes(&after.open()), [], "{nth}");
    }
}

/// Each entry counts inode and space of its value for the owner of the file, as the kernel has it.
#[test]
fn quotas_charge_ea_inodes_to_owners() {
    use draconis_device::Random;
    use draconis_ext::NewNode;
    use draconis_ext::tune::{TuneChanges, tune};
    use draconis_types::{AttributeChange, FileType, Time};
    for (features, arguments) in [
        ("", &["-b", "1024", "-I", "256"][..]),
        (",metadata_csum_seed", &["-b", "4096", "-I", "512"]),
        (",^extent,^64bit,^metadata_csum", &["-b", "1024", "-I", "128"]),
        (",inline_data", &["-b", "2048", "-I", "1024"]),
    ] {
        let features = format!("ea_inode{features}");
        let all = [&["-t", "ext4", "-O", &features], arguments].concat();
        let Some(image) = Image::make(None, "32M", &all) else { return };
        // Files of the kernel, which shares values and blocks of attributes.
        let Some(mount) = image.mount_writable() else { return };
        for nth in 0..6u32 {
            let file = mount.path().join(format!("{nth}"));
            fs::write(&file, b"contents").unwrap();
            assert!(set_xattr(&file, "user.1", &tree::random_bytes(7, 3000)));
            assert!(set_xattr(&file, "user.2", &tree::random_bytes(u64::from(nth % 2), 9000)));
            std::os::unix::fs::chown(&file, Some(nth), Some(nth % 3)).unwrap();
        }
        drop(mount);
        let disk = image.memory_disk();
        let has_projects = features.contains("seed");
        let added = if has_projects { &["project", "quota"][..] } else { &["quota"] };
        let added = added.iter().map(|name| (*name).to_owned()).collect();
        let changes = TuneChanges { features: added, ..TuneChanges::default() };
        let shared: Arc<dyn Disk> = disk.clone();
        tune(&shared, &changes, Time { seconds: 1_700_000_000, nanoseconds: 0 }).unwrap();
        drop(shared);
        let bytes = Arc::into_inner(disk).unwrap().into_bytes();
        assert!(
            common::run_tool("e2fsck", &["-fn", Image::from_bytes(&bytes).path()]).is_some(),
            "{features}"
        );
        let disk = Arc::new(MemoryDisk::new(bytes, 512));
        let volume =
            Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options())
                .unwrap();
        let (root, mut random) = (volume.root(), Random::new(3));
        for _ in 0..400 {
            let name = format!("{}", random.next_below(12));
            let uid = random.next_below(5) as u32;
            let new = NewNode {
                kind: FileType::File,
                mode: 0o644,
                uid,
                gid: uid,
                device: (0, 0),
                target: b"",
            };
            let file = volume.lookup(root, name.as_bytes());
            let file = file.or_else(|_| volume.create(root, name.as_bytes(), &new)).unwrap();
            let attribute = format!("user.{}", random.next_below(4));
            match random.next_below(7) {
                0 => {
                    let uid = Some(random.next_below(7) as u32);
                    let change = AttributeChange { uid, ..AttributeChange::default() };
                    volume.set_attributes(file, &change).unwrap();
                }
                1 => volume.unlink(root, name.as_bytes()).unwrap(),
                2 => drop(volume.remove_xattr(file, attribute.as_bytes())),
                3 if has_projects => {
                    volume.set_project(file, random.next_below(3) as u32).unwrap();
                }
                _ => {
                    let len = VALUE_LENGTHS[random.next_below(7) as usize];
                    let value = tree::random_bytes(random.next_below(2), len);
                    let any = XattrSet::Any;
                    let set = volume.set_xattr(file, attribute.as_bytes(), &value, any, false);
                    assert!(matches!(set, Ok(()) | Err(Error::NoSpace)), "{set:?}");
                }
            }
        }
        volume.close().unwrap();
        drop(volume);
        let after = Image::from_bytes(&Arc::into_inner(disk).unwrap().into_bytes());
        assert!(common::run_tool("e2fsck", &["-fn", after.path()]).is_some(), "{features}");
    }
}
