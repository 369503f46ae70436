//! Changes of a volume compared with a model in memory, checked by `e2fsck`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use crate::common::compare::{self, ReferenceTree};
use crate::common::{Image, run_tool};
use draconis_device::{Disk, MemoryDisk, Random};
use draconis_ext::{
    AccessTimes, Cookie, Error, InodeNumber, NewNode, OpenOptions, RenameMode, Reserve, Volume,
    WriteOptions, XattrSet,
};
use draconis_types::{AttributeChange, FileType, Time};

fn write_options() -> WriteOptions {
    let seconds = AtomicI64::new(1_700_000_000);
    let clock =
        move || Time { seconds: seconds.fetch_add(1, Ordering::Relaxed), nanoseconds: 123_456_789 };
    WriteOptions {
        clock: Arc::new(clock),
        dirty_bytes: 8 << 20,
        atime: AccessTimes::Never,
        discard: true,
    }
}

fn open_for_writing(disk: &Arc<MemoryDisk>) -> Volume {
    Volume::open_for_writing(disk.clone(), OpenOptions::default(), write_options()).unwrap()
}

/// Offset of the feature word with `needs_recovery`.
const NEEDS_RECOVERY_AT: usize = 1024 + 0x60;

/// Checks the disk with `e2fsck -fn`; any finding fails the test.
fn check_with_e2fsck(disk: Arc<MemoryDisk>, what: &str) -> Vec<u8> {
    let bytes = Arc::try_unwrap(disk).unwrap().into_bytes();
    let image = Image::from_bytes(&bytes);
    if bytes[NEEDS_RECOVERY_AT] & 4 != 0 {
        run_tool("e2fsck", &["-y", "-E", "journal_only", image.path()]);
    }
    let out = run_tool("e2fsck", &["-fn", image.path()]);
    if out.is_none() {
        std::fs::copy(image.path(), "/tmp/judged.img").unwrap();
    }
    assert!(out.is_some(), "{what}: e2fsck complains");
    bytes
}

#[derive(Clone, Debug, Default)]
struct ModelNode {
    kind: u8,
    mode: u32,
    bytes: Vec<u8>,
    names: BTreeMap<Vec<u8>, usize>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    number: u32,
    links: u32,
}

struct VolumeModel {
    nodes: Vec<ModelNode>,
    random: Random,
    /// Number of users and groups.
    owners: u64,
}

const DIR_TYPE: u8 = 2;
const FILE_TYPE: u8 = 1;
const SYMLINK_TYPE: u8 = 7;

impl VolumeModel {
    fn new(seed: u64) -> Self {
        let root = ModelNode { kind: DIR_TYPE, number: 2, ..ModelNode::default() };
        Self { nodes: vec![root], random: Random::new(seed), owners: 1 }
    }

    /// Returns a random user or group; with only one owner it is the superuser.
    fn random_owner(&mut self) -> u32 {
        match self.owners {
            1 => 0,
            owners => (self.random.next_below(owners) as u32).wrapping_mul(0x0301_7F0B),
        }
    }

    /// Returns a random directory.
    fn random_dir(&mut self) -> usize {
        let all: Vec<usize> = self
            .reachable_nodes()
            .into_iter()
            .filter(|n| self.nodes[*n].kind == DIR_TYPE)
            .collect();
        all[self.random.next_below(all.len() as u64) as usize]
    }

    fn random_file(&mut self) -> Option<usize> {
        let all: Vec<usize> = self
            .reachable_nodes()
            .into_iter()
            .filter(|n| self.nodes[*n].kind == FILE_TYPE)
            .collect();
        (!all.is_empty()).then(|| all[self.random.next_below(all.len() as u64) as usize])
    }

    fn reachable_nodes(&self) -> Vec<usize> {
        let mut all = vec![0];
        let mut at = 0;
        while at < all.len() {
            for child in self.nodes[all[at]].names.values() {
                if !all.contains(child) {
                    all.push(*child);
                }
            }
            at += 1;
        }
        all
    }

    fn random_new_name(&mut self, dir: usize) -> Vec<u8> {
        let there: Vec<&Vec<u8>> = self.nodes[dir].names.keys().collect();
        if !there.is_empty() && self.random.next_below(3) > 0 {
            return there[self.random.next_below(there.len() as u64) as usize].clone();
        }
        let n = self.random.next_below(60);
        let mut name = format!("name {n}").into_bytes();
        if n.is_multiple_of(7) {
            name.resize(200 + n as usize % 50, b'x');
        }
        name
    }

    fn is_below(&self, dir: usize, at: usize) -> bool {
        dir == at
            || self.nodes[dir]
                .names
                .values()
                .any(|c| self.nodes[*c].kind == DIR_TYPE && self.is_below(*c, at))
    }
}

fn inode_number(node: &ModelNode) -> InodeNumber {
    InodeNumber(node.number)
}

fn assert_matches_model(
    volume: &Volume,
    model: &VolumeModel,
    at: usize,
    seen: &mut BTreeMap<u32, usize>,
) {
    let node = &model.nodes[at];
    let attributes = volume.attributes(inode_number(node)).unwrap();
    if let Some(other) = seen.insert(node.number, at) {
        assert_eq!(other, at);
        return;
    }
    if at != 0 {
        assert_eq!(attributes.mode & 0o7777, node.mode, "mode of {}", node.number);
    }
    match node.kind {
        DIR_TYPE => {
            let mut found = BTreeMap::new();
            volume
                .entries(inode_number(node), Cookie::default(), false, |entry| {
                    let entry = entry.unwrap();
                    assert!(found.insert(entry.name.to_vec(), entry.inode.0).is_none());
                    true
                })
                .unwrap();
            found.remove(&b"lost+found"[..]);
            let wanted: BTreeMap<Vec<u8>, u32> = node
                .names
                .iter()
                .map(|(name, child)| (name.clone(), model.nodes[*child].number))
                .collect();
            assert_eq!(found, wanted);
            for (name, child) in &node.names {
                assert_eq!(
                    volume.lookup(inode_number(node), name).unwrap().0,
                    model.nodes[*child].number
                );
                assert_matches_model(volume, model, *child, seen);
            }
        }
        SYMLINK_TYPE => assert_eq!(volume.read_link(inode_number(node)).unwrap(), node.bytes),
        _ => {
            assert_eq!(attributes.size_bytes, node.bytes.len() as u64);
            let mut bytes = vec![7; node.bytes.len() + 1];
            let got = volume.read_into(inode_number(node), 0, &mut bytes).unwrap();
            bytes.truncate(got);
            assert!(
                bytes == node.bytes,
                "contents of inode {} ({} bytes), from byte {:?}",
                node.number,
                node.bytes.len(),
                bytes.iter().zip(&node.bytes).position(|(a, b)| a != b)
            );
            assert_eq!(attributes.links, node.links);
        }
    }
    let mut names = volume.xattr_names(inode_number(node)).unwrap();
    names.sort();
    assert_eq!(names, node.xattrs.keys().cloned().collect::<Vec<_>>());
    for (name, value) in &node.xattrs {
        assert_eq!(&volume.xattr(inode_number(node), name).unwrap(), value);
    }
}

/// Makes one random change of both; returns its description.
#[allow(clippy::too_many_lines)]
fn random_change(volume: &Volume, model: &mut VolumeModel) -> String {
    let what = model.random.next_below(100);
    let dir = model.random_dir();
    let name = model.random_new_name(dir);
    let dir_number = inode_number(&model.nodes[dir]);
    let there = model.nodes[dir].names.get(&name).copied();
    let shown = format!("{what} in {} {}", dir_number.0, name.escape_ascii());
    match what {
        0..30 => {
            let kind = match model.random.next_below(10) {
                0..5 => FileType::File,
                5..8 => FileType::Directory,
                _ => FileType::Symlink,
            };
            let len = if model.random.next_below(2) == 0 { 20 } else { 300 };
            let target = vec![b't'; len];
            let mode = 0o600 + model.random.next_below(0o200) as u32;
            let (uid, gid) = (model.random_owner(), model.random_owner());
            let new = NewNode { kind, mode, uid, gid, device: (0, 0), target: &target };
            match volume.create(dir_number, &name, &new) {
                Ok(made) => {
                    assert!(there.is_none(), "{shown}");
                    let id = model.nodes.len();
                    let links = if kind == FileType::Directory { 2 } else { 1 };
                    let bytes = if kind == FileType::Symlink { target.clone() } else { vec![] };
                    let kind = match kind {
                        FileType::File => FILE_TYPE,
                        FileType::Directory => DIR_TYPE,
                        _ => SYMLINK_TYPE,
                    };
                    model.nodes.push(ModelNode {
                        kind,
                        mode,
                        number: made.0,
                        links,
                        bytes,
                        ..ModelNode::default()
                    });
                    model.nodes[dir].names.insert(name, id);
                }
                Err(Error::NoSpace) => {}
                Err(Error::Exists) => assert!(there.is_some(), "{shown}"),
                Err(error) => panic!("{shown}: {error}"),
            }
        }
        30..45 => {
            let unlinked = volume.unlink(dir_number, &name);
            match there {
                None => assert_eq!(unlinked, Err(Error::NotFound), "{shown}"),
                Some(id) if model.nodes[id].kind == DIR_TYPE => {
                    assert_eq!(unlinked, Err(Error::IsADirectory), "{shown}");
                    let removed = volume.remove_directory(dir_number, &name);
                    if model.nodes[id].names.is_empty() {
                        removed.unwrap();
                        model.nodes[dir].names.remove(&name);
                    } else {
                        assert_eq!(removed, Err(Error::NotEmpty));
                    }
                }
                Some(id) => {
                    unlinked.unwrap();
                    model.nodes[id].links -= 1;
                    model.nodes[dir].names.remove(&name);
                }
            }
        }
        45..60 => {
            let to_dir = model.random_dir();
            let to = model.random_new_name(to_dir);
            let to_number = inode_number(&model.nodes[to_dir]);
            let how = match model.random.next_below(4) {
                0 => RenameMode::NoReplace,
                1 => RenameMode::Exchange,
                _ => RenameMode::Replace,
            };
            let shown = format!("{shown} to {} {} {how:?}", to_number.0, to.escape_ascii());
            let done = volume.rename(dir_number, &name, to_number, &to, how);
            if done == Err(Error::NoSpace) {
                return shown;
            }
            let target = model.nodes[to_dir].names.get(&to).copied();
            let Some(id) = there else {
                assert_eq!(done, Err(Error::NotFound), "{shown}");
                return shown;
            };
            let is_dir = |id: usize| model.nodes[id].kind == DIR_TYPE;
            if is_dir(id) && model.is_below(id, to_dir) {
                assert!(matches!(done, Err(Error::Misuse(_))), "{shown}: {done:?}");
                return shown;
            }
            match (target, how) {
                (Some(_), RenameMode::NoReplace) => assert_eq!(done, Err(Error::Exists), "{shown}"),
                (None, RenameMode::Exchange) => assert_eq!(done, Err(Error::NotFound), "{shown}"),
                (Some(other), _) if other == id => assert_eq!(done, Ok(()), "{shown}"),
                (Some(other), RenameMode::Exchange) => {
                    if is_dir(other) && model.is_below(other, dir) {
                        assert!(matches!(done, Err(Error::Misuse(_))), "{shown}");
                    } else {
                        assert_eq!(done, Ok(()), "{shown}");
                        model.nodes[dir].names.insert(name, other);
                        model.nodes[to_dir].names.insert(to, id);
                    }
                }
                (Some(other), _) => match (is_dir(id), is_dir(other)) {
                    (true, false) => assert_eq!(done, Err(Error::NotADirectory), "{shown}"),
                    (false, true) => assert_eq!(done, Err(Error::IsADirectory), "{shown}"),
                    (true, true) if !model.nodes[other].names.is_empty() => {
                        assert_eq!(done, Err(Error::NotEmpty), "{shown}");
                    }
                    _ => {
                        assert_eq!(done, Ok(()), "{shown}");
                        model.nodes[other].links -= 1;
                        model.nodes[dir].names.remove(&name);
                        model.nodes[to_dir].names.insert(to, id);
                    }
                },
                (None, _) => {
                    assert_eq!(done, Ok(()), "{shown}");
                    model.nodes[dir].names.remove(&name);
                    model.nodes[to_dir].names.insert(to, id);
                }
            }
            return shown;
        }
        60..80 => {
            let Some(id) = model.random_file() else { return shown };
            let file = inode_number(&model.nodes[id]);
            let offset = match model.random.next_below(4) {
                0 => model.random.next_below(3_000_000),
                1 => model.nodes[id].bytes.len() as u64,
                _ => model.random.next_below(20_000),
            } as usize;
            let len = (if model.random.next_below(4) == 0 {
                model.random.next_below(100_000)
            } else {
                model.random.next_below(3_000)
            }) as usize;
            let mut bytes = vec![0; len];
            for byte in &mut bytes {
                *byte = model.random.next_below(255) as u8 + 1;
            }
            let taken = match volume.write(file, offset as u64, &bytes) {
                Ok(taken) => taken,
                Err(Error::NoSpace) => 0,
                Err(error) => panic!("{shown}: {error}"),
            };
            if taken > 0 {
                let contents = &mut model.nodes[id].bytes;
                if contents.len() < offset + taken {
                    contents.resize(offset + taken, 0);
                }
                contents[offset..offset + taken].copy_from_slice(&bytes[..taken]);
            }
            return format!("write {} at {offset} {len}: {taken}", file.0);
        }
        80..88 => {
            let Some(id) = model.random_file() else { return shown };
            let file = inode_number(&model.nodes[id]);
            let size = match model.random.next_below(3) {
                0 => 0,
                1 => model.random.next_below(model.nodes[id].bytes.len() as u64 + 1),
                _ => model.random.next_below(2_000_000),
            };
            let mut change =
                AttributeChange { size_bytes: Some(size), ..AttributeChange::default() };
            if model.owners > 1 {
                (change.uid, change.gid) = (Some(model.random_owner()), Some(model.random_owner()));
            }
            match volume.set_attributes(file, &change) {
                Ok(_) => {}
                // There may be no space to count another owner.
                Err(Error::NoSpace) if model.owners > 1 => return shown,
                Err(error) => panic!("{shown}: {error}"),
            }
            model.nodes[id].bytes.resize(size as usize, 0);
            return format!("truncate {} to {size}", file.0);
        }
        88..92 => {
            let Some(id) = model.random_file() else { return shown };
            let file = inode_number(&model.nodes[id]);
            let (offset, len) =
                (model.random.next_below(100_000), model.random.next_below(60_000) + 1);
            let how = match model.random.next_below(5) {
                0 => Reserve::Allocate,
                1 => Reserve::KeepSize,
                2 => Reserve::PunchHole,
                3 => Reserve::ZeroRange { keep_size: true },
                _ => Reserve::ZeroRange { keep_size: false },
            };
            let keep = matches!(how, Reserve::KeepSize | Reserve::ZeroRange { keep_size: true });
            let done = volume.fallocate(file, offset, len, how);
            let contents = &mut model.nodes[id].bytes;
            let end = (offset + len) as usize;
            if matches!(done, Err(Error::Unsupported { .. })) {
                assert!(keep && end > contents.len(), "{shown}");
                return shown;
            }
            if done == Err(Error::NoSpace) {
                if matches!(how, Reserve::ZeroRange { .. }) {
                    let end = end.min(contents.len());
                    contents.get_mut(offset as usize..end).unwrap_or_default().fill(0);
                }
                // With extents the file keeps its allocated range.
                let size = volume.attributes(file).unwrap().size_bytes as usize;
                if !keep && how != Reserve::PunchHole && contents.len() < size {
                    contents.resize(size.min(end), 0);
                }
                return shown;
            }
            done.unwrap();
            if !keep && how != Reserve::PunchHole && contents.len() < end {
                contents.resize(end, 0);
            }
            if matches!(how, Reserve::PunchHole | Reserve::ZeroRange { .. }) {
                let end = end.min(contents.len());
                contents.get_mut(offset as usize..end).unwrap_or_default().fill(0);
            }
            return format!("{how:?} {} {offset} {len}", file.0);
        }
        92..96 => {
            let Some(id) = model.random_file() else { return shown };
            let file = inode_number(&model.nodes[id]);
            let name = format!("user.{}", model.random.next_below(5)).into_bytes();
            if model.random.next_below(3) == 0 {
                let removed = volume.remove_xattr(file, &name);
                match model.nodes[id].xattrs.remove(&name) {
                    Some(_) => removed.unwrap(),
                    None => assert_eq!(removed, Err(Error::NoAttribute)),
                }
            } else {
                let value = vec![b'v'; model.random.next_below(300) as usize];
                match volume.set_xattr(file, &name, &value, XattrSet::Any, false) {
                    Ok(()) => drop(model.nodes[id].xattrs.insert(name, value)),
                    Err(error) => assert_eq!(error, Error::NoSpace),
                }
            }
        }
        96..98 => {
            let Some(id) = there.filter(|id| model.nodes[*id].kind != DIR_TYPE) else {
                return shown;
            };
            let to_dir = model.random_dir();
            let to = model.random_new_name(to_dir);
            let linked = volume.link(
                inode_number(&model.nodes[id]),
                inode_number(&model.nodes[to_dir]),
                &to,
            );
            match linked {
                Ok(()) => {
                    assert!(!model.nodes[to_dir].names.contains_key(&to));
                    model.nodes[to_dir].names.insert(to, id);
                    model.nodes[id].links += 1;
                }
                Err(Error::Exists) => assert!(model.nodes[to_dir].names.contains_key(&to)),
                Err(error) => assert_eq!(error, Error::NoSpace),
            }
        }
        98 => volume.commit().unwrap(),
        _ => volume.sync().unwrap(),
    }
    shown
}

/// Checks that the kernel sees the same, and can continue.
fn check_with_kernel(bytes: &[u8]) {
    let image = Image::from_bytes(bytes);
    {
        let Some(mount) = image.mount_large() else { return };
        compare::compare_trees(
            &image.open(),
            InodeNumber::ROOT,
            mount.path(),
            ReferenceTree::Mount,
        );
    }
    let Some(mount) = image.mount_writable() else { return };
    let dir = mount.path().join("by the kernel");
    std::fs::create_dir(&dir).unwrap();
    for nth in 0..200 {
        std::fs::write(dir.join(format!("file {nth}")), vec![nth as u8; nth * 10]).unwrap();
    }
    drop(mount);
    let disk = image.memory_disk();
    let volume = open_for_writing(&disk);
    let dir = volume.lookup(volume.root(), b"by the kernel").unwrap();
    for nth in 0..200 {
        let name = format!("file {nth}");
        if nth % 2 == 0 {
            volume.unlink(dir, name.as_bytes()).unwrap();
        } else {
            let to = format!("moved {nth}");
            let how = RenameMode::NoReplace;
            volume.rename(dir, name.as_bytes(), volume.root(), to.as_bytes(), how).unwrap();
        }
    }
    volume.remove_directory(volume.root(), b"by the kernel").unwrap();
    volume.close().unwrap();
    drop(volume);
    check_with_e2fsck(disk, "after the kernel");
}

fn run_storm(arguments: &[&str], size: &str, seed: u64, steps: u32) {
    run_storm_with_owners(1, arguments, size, seed, steps);
}

fn run_storm_with_owners(owners: u64, arguments: &[&str], size: &str, seed: u64, steps: u32) {
    let Some(image) = Image::make(None, size, arguments) else { return };
    let mut disk = image.memory_disk();
    let mut model = VolumeModel { owners, ..VolumeModel::new(seed) };
    for round in 0..4 {
        let volume = open_for_writing(&disk);
        let mut log = Vec::new();
        for _ in 0..steps {
            log.push(random_change(&volume, &mut model));
            if std::env::var_os("DRACONIS_CAREFUL").is_some() {
                eprintln!("{seed} {round} {}", log.last().unwrap());
                assert_matches_model(&volume, &model, 0, &mut BTreeMap::new());
            }
            if let Some(failure) = volume.failure() {
                panic!("{failure}; the last steps: {:#?}", &log[log.len().saturating_sub(5)..]);
            }
        }
        assert_matches_model(&volume, &model, 0, &mut BTreeMap::new());
        volume.close().unwrap();
        drop(volume);
        let bytes = check_with_e2fsck(disk, &format!("{arguments:?} seed {seed} round {round}"));
        if round == 3 && bytes.len() > 4 << 20 {
            check_with_kernel(&bytes);
        }
        disk = Arc::new(MemoryDisk::new(bytes, 512));
        let plain = Volume::open(disk.clone() as Arc<dyn Disk>, OpenOptions::default()).unwrap();
        assert_matches_model(&plain, &model, 0, &mut BTreeMap::new());
    }
    // A crash between two commits leaves nothing to repair.
    let volume = open_for_writing(&disk);
    for _ in 0..steps / 3 {
        random_change(&volume, &mut model);
    }
    drop(volume);
    check_with_e2fsck(disk, &format!("{arguments:?} seed {seed} killed"));
}

#[test]
fn storms_on_all_block_sizes_match_model() {
    for (seed, block) in [(1, "1024"), (2, "2048"), (3, "4096")] {
        run_storm(&["-b", block], "64M", seed, 1500);
    }
}

draconis_testkit::first_and_all! {
    storms_on_full_tiny_volumes_match_model(2),
    all_storms_on_full_tiny_volumes_match_model,
    10..18,
    |seed| run_storm(&["-b", "1024", "-N", "64", "-m", "0"], "1M", seed, 1500)
}

#[test]
fn storms_without_features_match_model() {
    run_storm(&["-b", "1024", "-O", "none"], "16M", 20, 1500);
    run_storm(&["-b", "1024", "-I", "128", "-O", "^dir_index,^filetype"], "16M", 21, 1500);
}

/// Long storms: `DRACONIS_STORMS=200 cargo test --release -p draconis-ext --test main writing:: -- long`.
#[test]
fn long_storms_match_model() {
    let seeds = std::env::var("DRACONIS_STORMS").ok().and_then(|it| it.parse().ok()).unwrap_or(1);
    let first = std::env::var("DRACONIS_FIRST").ok().and_then(|it| it.parse().ok()).unwrap_or(100);
    for seed in first..first + seeds {
        eprintln!("seed {seed}");
        let block = ["1024", "2048", "4096"][seed as usize % 3];
        match seed % 4 {
            0 => run_storm(&["-b", block], "32M", seed, 3000),
            1 => run_storm(&["-b", "1024", "-N", "80", "-m", "0"], "1M", seed, 2000),
            2 => run_storm(&["-b", block, "-I", "128", "-N", "300"], "4M", seed, 2000),
            _ => run_storm(&["-b", block, "-g", "1024", "-N", "4000"], "16M", seed, 3000),
        }
    }
}

#[test]
fn lookups_in_large_directory_after_deletions() {
    let Some(image) = Image::make(None, "64M", &["-b", "1024", "-N", "70000"]) else { return };
    let disk = image.memory_disk();
    let volume = open_for_writing(&disk);
    let new =
        NewNode { kind: FileType::File, mode: 0o644, uid: 0, gid: 0, device: (0, 0), target: b"" };
    let dir = NewNode { kind: FileType::Directory, ..new };
    let many = volume.create(volume.root(), b"many", &dir).unwrap();
    let count = 60_000;
    for nth in 0..count {
        let name = format!("{nth} is a name of some length");
        volume.create(many, name.as_bytes(), &new).unwrap();
        if nth % 20_000 == 0 {
            volume.commit().unwrap();
        }
    }
    for nth in (0..count).filter(|nth| nth % 3 != 0) {
        volume.unlink(many, format!("{nth} is a name of some length").as_bytes()).unwrap();
    }
    for nth in (0..count).step_by(1000) {
        let found = volume.lookup(many, format!("{nth} is a name of some length").as_bytes());
        assert_eq!(found.is_ok(), nth % 3 == 0);
    }
    volume.close().unwrap();
    drop(volume);
    check_with_e2fsck(disk, "many names");
}

/// Extents, checksums, uninitialized groups, descriptors of 64 bytes.
const EXT4_VOLUMES: &[&[&str]] = &[
    &["-t", "ext4", "-b", "1024"],
    &["-t", "ext4", "-b", "4096", "-I", "1024"],
    &["-t", "ext4", "-b", "1024", "-O", "^has_journal", "-I", "128"],
    &["-t", "ext4", "-b", "1024", "-O", "^metadata_csum,uninit_bg,^64bit"],
    &["-t", "ext4", "-b", "2048", "-O", "^extent,^64bit,metadata_csum_seed", "-g", "1024"],
    &["-t", "ext4", "-b", "1024", "-O", "meta_bg,^resize_inode,large_dir", "-g", "512"],
    &["-t", "ext4", "-b", "65536"],
    &["-t", "ext4", "-b", "1024", "-O", "ea_inode,orphan_file,stable_inodes"],
    &["-t", "ext4", "-b", "2048", "-O", "casefold,encrypt,verity,project,^has_journal"],
];

draconis_testkit::first_and_all! {
    storms_on_ext4_match_model(2),
    all_storms_on_ext4_match_model,
    (40..).zip(EXT4_VOLUMES),
    |(seed, arguments)| run_storm(arguments, "64M", seed, 1500)
}

draconis_testkit::first_and_all! {
    storms_on_full_tiny_ext4_match_model(2),
    all_storms_on_full_tiny_ext4_match_model,
    60..70,
    |seed| {
        let arguments = ["-t", "ext4", "-b", "1024", "-N", "64", "-m", "0", "-O", "^has_journal"];
        run_storm(&arguments, "1M", seed, 1500);
    }
}

/// Small and large clusters; groups of few and of many clusters.
const BIGALLOC_VOLUMES: &[&[&str]] = &[
    &["-t", "ext4", "-b", "1024", "-O", "bigalloc", "-C", "2048"],
    &["-t", "ext4", "-b", "4096", "-O", "bigalloc", "-C", "65536"],
    &["-t", "ext4", "-b", "1024", "-O", "bigalloc,^has_journal,^64bit", "-C", "8192"],
    &["-t", "ext4", "-b", "2048", "-O", "bigalloc,^metadata_csum,uninit_bg", "-C", "32768"],
    &["-t", "ext4", "-b", "1024", "-O", "bigalloc,meta_bg,^resize_inode", "-C", "4096"],
    &["-t", "ext4", "-b", "1024", "-O", "bigalloc,^flex_bg", "-C", "4096", "-g", "4096"],
];

draconis_testkit::first_and_all! {
    storms_on_bigalloc_match_model(1),
    all_storms_on_bigalloc_match_model,
    (80..).zip(BIGALLOC_VOLUMES),
    |(seed, arguments)| run_storm(arguments, "96M", seed, 1500)
}

draconis_testkit::first_and_all! {
    storms_on_full_tiny_bigalloc_match_model(1),
    all_storms_on_full_tiny_bigalloc_match_model,
    (90..).zip(["2048", "4096", "16384"].repeat(3)),
    |(seed, cluster)| {
        let features = "bigalloc,^has_journal";
        let arguments =
            ["-t", "ext4", "-b", "1024", "-N", "64", "-m", "0", "-O", features, "-C", cluster];
        run_storm(&arguments, "2M", seed, 1500);
    }
}

/// Quotas of all kinds, with a journal and without.
const QUOTA_VOLUMES: &[&[&str]] = &[
    &["-t", "ext4", "-b", "1024", "-O", "quota"],
    &["-t", "ext4", "-b", "4096", "-O", "quota,project", "-E", ALL_QUOTA_TYPES],
    &["-t", "ext4", "-b", "1024", "-O", "quota,project,^has_journal", "-E", ALL_QUOTA_TYPES],
    &["-t", "ext4", "-b", "65536", "-O", "quota"],
    &["-t", "ext3", "-b", "2048", "-O", "quota"],
    &["-t", "ext2", "-b", "1024", "-O", "quota"],
];

const ALL_QUOTA_TYPES: &str = "quotatype=usrquota:grpquota:prjquota";

draconis_testkit::first_and_all! {
    storms_with_quota_match_model(1),
    all_storms_with_quota_match_model,
    (110..).zip(QUOTA_VOLUMES),
    |(seed, arguments)| run_storm_with_owners(40, arguments, "64M", seed, 1500)
}

draconis_testkit::first_and_all! {
    storms_on_full_tiny_quota_volumes_match_model(1),
    all_storms_on_full_tiny_quota_volumes_match_model,
    120..126,
    |seed| {
        let features = if seed % 2 == 0 { "quota,^has_journal" } else { "quota,project" };
        let arguments = ["-t", "ext4", "-b", "1024", "-N", "64", "-m", "0", "-O", features];
        run_storm_with_owners(200, &arguments, if seed % 2 == 0 { "1M" } else { "4M" }, seed, 1500);
    }
}

#[test]
fn quotas_of_many_users_are_counted() {
    for block in ["1024", "4096"] {
        let arguments = ["-t", "ext4", "-b", block, "-O", "quota", "-N", "4096"];
        let Some(image) = Image::make(None, "64M", &arguments) else { return };
        let disk = image.memory_disk();
        let volume = open_for_writing(&disk);
        let mut random = Random::new(7);
        let mut made = Vec::new();
        for nth in 0..2000u32 {
            let uid = random.next_below(1 << 32) as u32;
            let kind = FileType::File;
            let new = NewNode { kind, mode: 0o644, uid, gid: nth, device: (0, 0), target: b"" };
            let name = format!("file {nth}");
            let file = volume.create(volume.root(), name.as_bytes(), &new).unwrap();
            volume.write(file, 0, &vec![7; nth as usize]).unwrap();
            made.push((name, file));
            if nth % 500 == 0 {
                volume.sync().unwrap();
            }
        }
        for (nth, (name, file)) in made.iter().enumerate() {
            match nth % 3 {
                0 => volume.unlink(volume.root(), name.as_bytes()).unwrap(),
                1 => {
                    let gid = Some(nth as u32 * 7);
                    let change =
                        AttributeChange { uid: Some(5), gid, ..AttributeChange::default() };
                    volume.set_attributes(*file, &change).unwrap();
                }
                _ => {}
            }
        }
        volume.close().unwrap();
        drop(volume);
        let bytes = check_with_e2fsck(disk, "many users");
        check_with_kernel(&bytes);
    }
}
