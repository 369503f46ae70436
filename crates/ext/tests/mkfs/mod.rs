//! Our volumes compared with those of `mke2fs`, and viewed by other tools.

mod features;
mod trees;

use std::path::Path;

use crate::common::compare::ReferenceTree;
use crate::common::{Image, run_tool};
use draconis_device::{FileDisk, FileOptions, MemoryDisk, Random};
use draconis_ext::mkfs::{
    self, FileSource, FormatError, FormatOptions, FormatTarget, InodeCount, Layout, NodeId,
    NodeKind, Tree, TreeNode, VolumePlan,
};
use draconis_ext::{Follow, InodeNumber, Volume};
use draconis_testkit::judge::{assert_fsck_clean, tool_command};
use draconis_testkit::{Fault, FaultDisk, FaultTarget};
use draconis_types::Time;
use trees::{
    SyntheticTree, assert_kernel_sees_tree, assert_same_contents, assert_volume_matches_tree,
    build_boundary_tree, split_tree_and_files,
};

const VOLUME_UUID: &str = "11111111-2222-3333-4444-555555555555";
const HASH_SEED: &str = "01234567-89ab-cdef-0123-456789abcdef";
const CREATION_TIME: u32 = 1_700_000_000;

struct FailingFileSource;

impl FileSource for FailingFileSource {
    fn read(&self, _: u64, _: u64, _: &mut [u8]) -> std::io::Result<()> {
        Err(std::io::ErrorKind::NotFound.into())
    }
}

fn parse_uuid(text: &str) -> [u8; 16] {
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'-').collect();
    let nibble = |byte: u8| char::from(byte).to_digit(16).unwrap() as u8;
    std::array::from_fn(|nth| nibble(digits[2 * nth]) << 4 | nibble(digits[2 * nth + 1]))
}

fn default_options() -> FormatOptions {
    FormatOptions {
        uuid: parse_uuid(VOLUME_UUID),
        hash_seed: parse_uuid(HASH_SEED),
        time: CREATION_TIME,
        ..FormatOptions::default()
    }
}

fn empty_root_tree() -> Tree {
    let time = Time { seconds: i64::from(CREATION_TIME), nanoseconds: 0 };
    Tree::new(TreeNode::new(NodeKind::Directory, 0o755).with_all_times(time))
}

/// Writes a plan to a new file.
fn write_image(plan: &VolumePlan<'_>, contents: &dyn FileSource, path: &Path) -> mkfs::Result<()> {
    let file = std::fs::File::create(path).unwrap();
    file.set_len(plan.layout().len_bytes()).unwrap();
    let options = FileOptions { write: true, direct: false, uring: false };
    let disk = FileDisk::open(path, options).unwrap();
    mkfs::write(plan, contents, &FormatTarget { disk: &disk, zeroed: true, progress: &|_| {} })
}

/// Parses arguments of `mke2fs` into options.
fn parse_mke2fs_arguments(arguments: &str) -> FormatOptions {
    let mut options = default_options();
    let mut words = arguments.split_whitespace();
    while let Some(flag) = words.next() {
        let value = words.next().unwrap();
        match flag {
            "-t" => {
                let FormatOptions { uuid, hash_seed, time, .. } = options;
                options = FormatOptions {
                    uuid,
                    hash_seed,
                    time,
                    ..FormatOptions::for_type(value).unwrap()
                };
            }
            "-G" => options.flex_groups = value.parse().unwrap(),
            "-J" => options.journal.mib = Some(value["size=".len()..].parse().unwrap()),
            "-E" => {
                for option in value.split(',') {
                    let (name, value) = option.split_once('=').unwrap_or((option, ""));
                    match name {
                        "stride" => options.stride = value.parse().unwrap(),
                        "stripe_width" => options.stripe_width = value.parse().unwrap(),
                        "num_backup_sb" => options.backups = value.parse().unwrap(),
                        "resize" => options.resize_blocks = Some(value.parse().unwrap()),
                        "packed_meta_blocks" => options.packed_meta_blocks = true,
                        "mmp_update_interval" => options.mmp_interval = value.parse().unwrap(),
                        "quotatype" => {
                            let kinds = ["usrquota", "grpquota", "prjquota"];
                            options.quotas = kinds.map(|kind| value.contains(kind));
                        }
                        other => panic!("{other}"),
                    }
                }
            }
            "-b" => options.block_bytes = Some(value.parse().unwrap()),
            "-C" => options.cluster_bytes = Some(value.parse().unwrap()),
            "-I" => options.inode_bytes = value.parse().unwrap(),
            "-i" => options.inodes = InodeCount::PerBytes(value.parse().unwrap()),
            "-N" => options.inodes = InodeCount::Count(value.parse().unwrap()),
            "-L" => options.label = value.into(),
            "-O" => options.apply_features(value).unwrap(),
            "-m" => options.reserved_ppm = (value.parse::<f64>().unwrap() * 10_000.0) as u32,
            other => panic!("{other}"),
        }
    }
    options
}

/// Makes a volume with mke2fs, or `None` if it refuses; `size` in KiB.
fn format_with_mke2fs(arguments: &str, size: u64) -> Option<Image> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let mut extended = format!("hash_seed={HASH_SEED},root_owner=0:0");
    if has_group_checksums(arguments) {
        // Written tables, as ours.
        extended += ",lazy_itable_init=0";
    }
    let mut words: Vec<&str> = arguments.split_whitespace().collect();
    // Of two lists, mke2fs uses the last.
    if let Some(at) = words.iter().position(|word| *word == "-E") {
        extended = format!("{extended},{}", words[at + 1]);
        words.drain(at..at + 2);
    }
    if !words.contains(&"-t") {
        words.extend(["-t", "ext2"]);
    }
    let output = tool_command("mke2fs")
        .env("E2FSPROGS_FAKE_TIME", CREATION_TIME.to_string())
        .args(["-q", "-F", "-U", VOLUME_UUID, "-E", &extended])
        .args(words)
        .arg(&path)
        .arg(format!("{size}k"))
        .output()
        .unwrap();
    output.status.success().then_some(Image { dir, path })
}

fn format_with_draconis(arguments: &str, size: u64) -> mkfs::Result<Image> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let layout = Layout::new(&parse_mke2fs_arguments(arguments), size * 1024)?;
    let mut tree = empty_root_tree();
    write_image(&VolumePlan::new(layout, &mut tree)?, &FailingFileSource, &path)?;
    Ok(Image { dir, path })
}

/// Returns true if descriptors have checksums and uninitialized flags.
fn has_group_checksums(arguments: &str) -> bool {
    let features = parse_mke2fs_arguments(arguments).read_only_compatible;
    features.intersects(draconis_ext::format::features::ReadOnlyCompatible::CHECKSUMS)
}

fn assert_same_layout_as_mke2fs(arguments: &str, size: u64) {
    let what = format!("mke2fs {arguments} {size}k");
    match (format_with_mke2fs(arguments, size), format_with_draconis(arguments, size)) {
        (Some(theirs), Ok(ours)) => {
            assert_fsck_clean(&ours.path);
            let (ours_shown, theirs_shown) =
                (dumpe2fs_without_ignored_fields(&ours), dumpe2fs_without_ignored_fields(&theirs));
            // With eight inodes per group, lost+found is not in group 0, and mke2fs places its
            // blocks in its group; ours stay at the start of the volume.
            if theirs_shown.contains("Inodes per group:         8\n") {
                return;
            }
            let lines = || ours_shown.lines().zip(theirs_shown.lines());
            if let Some(at) = lines().position(|(ours, theirs)| ours != theirs) {
                let few: Vec<_> = lines().skip(at).take(9).collect();
                panic!("{what}, ours and theirs: {few:#?}");
            }
            assert_eq!(ours_shown.len(), theirs_shown.len(), "{what}");
            if size <= 64 << 10 {
                assert_same_bytes(&ours, &theirs, &what);
            }
        }
        (None, Err(_)) => {}
        (theirs, ours) => {
            panic!("{what}: theirs {:?}, ours {:?}", theirs.is_some(), ours.err())
        }
    }
}

/// Fields that differ: bytes written, MMP host, and checksums over them.
const IGNORED_DUMPE2FS_FIELDS: [&str; 6] = [
    "Lifetime writes:",
    "Checksum:",
    "    mmp_update_",
    "    mmp_node_name:",
    "    mmp_device_name:",
    "    checksum:",
];

/// Returns the output of dumpe2fs without these fields.
fn dumpe2fs_without_ignored_fields(image: &Image) -> String {
    let shown = run_tool("dumpe2fs", &[image.path()]).unwrap();
    let is_own = |line: &&str| !IGNORED_DUMPE2FS_FIELDS.iter().any(|own| line.starts_with(own));
    shown.lines().filter(is_own).map(|line| format!("{line}\n")).collect()
}

/// Returns the bytes of a volume without these fields.
fn bytes_without_ignored_fields(image: &Image) -> Vec<u8> {
    let mut bytes = std::fs::read(&image.path).unwrap();
    let magic = [0x53, 0xEF];
    for at in (0..bytes.len() - 1024).step_by(1024) {
        if bytes[at + 56..at + 58] == magic
            && bytes[at + 0x68..at + 0x78] == parse_uuid(VOLUME_UUID)
        {
            bytes[at + 0x178..at + 0x180].fill(0);
            bytes[at + 0x3FC..at + 0x400].fill(0);
        }
        if bytes[at..at + 4] == *b"PMM\0" {
            bytes[at + 8..at + 112].fill(0);
            bytes[at + 0x3FC..at + 0x400].fill(0);
        }
    }
    bytes
}

fn assert_same_bytes(ours: &Image, theirs: &Image, what: &str) {
    let [ours, theirs] = [ours, theirs].map(bytes_without_ignored_fields);
    let len = ours.len().min(theirs.len());
    assert!(theirs[len..].iter().all(|byte| *byte == 0), "{what}");
    let different = (0..len).find(|at| ours[*at] != theirs[*at]);
    if let Some(at) = different {
        let from = at & !15;
        panic!(
            "{what}: at {at:#x}\n ours   {:02x?}\n theirs {:02x?}",
            &ours[from..from + 16],
            &theirs[from..from + 16]
        );
    }
}

#[test]
#[ignore = "long: half a minute: many sizes"]
fn small_volumes_equal_mke2fs_byte_for_byte() {
    for size in [
        20, 60, 100, 200, 360, 720, 1440, 2048, 3071, 3072, 5000, 8191, 8192, 8193, 8240, 8300,
        8545, 8550, 16384, 16386, 16750, 16800, 30000, 65536,
    ] {
        assert_same_layout_as_mke2fs("", size);
    }
    for (arguments, size) in [
        ("-b 1024 -N 16", 58),
        ("-b 1024 -N 16", 59),
        ("-b 1024 -N 16", 64),
        ("-b 1024 -N 12", 4096),
        ("-b 1024 -N 13", 4096),
        ("-b 2048", 10000),
        ("-b 4096", 20000),
        ("-b 8192", 30000),
        ("-b 16384", 40000),
        ("-b 32768", 50000),
        ("-b 65536", 60000),
        ("-b 4096 -I 128", 65536),
        ("-b 1024 -I 1024", 10000),
        ("-N 100", 8192),
        ("-N 13", 10000),
        ("-N 54 -O ^resize_inode", 50000),
        ("-N 16384 -I 128", 8192),
        ("-N 30000 -I 128 -b 1024", 8192),
        ("-N 65000 -I 128 -b 1024", 8192),
        ("-N 100000", 65536),
        ("-i 1024", 65536),
        ("-i 65536", 65536),
        ("-b 4096 -i 1024", 65536),
        ("-O ^resize_inode", 65536),
        ("-O ^sparse_super,^resize_inode", 65536),
        ("-O none", 8192),
        ("-O ^dir_index,^filetype", 4096),
        ("-m 0 -L sixteen_letters_", 9000),
        ("-m 12.5", 9000),
    ] {
        assert_same_layout_as_mke2fs(arguments, size);
    }
}

#[test]
fn large_volume_layout_matches_mke2fs() {
    for (arguments, kib) in [
        ("", 300 << 10),
        ("", 511 << 10),
        ("", 512 << 10),
        ("", 3 << 20),
        ("", 20 << 20),
        ("-b 1024", 1 << 20),
        ("-b 2048", 600 << 10),
        ("-b 4096", 131_076),
        ("-b 4096", 129 << 10),
        ("-b 4096", 132 << 10),
        ("-b 4096", 256 << 10),
        ("-b 4096", 263_168),
        ("-b 4096 -N 40000", 128 << 10),
        ("-b 16384 -N 300000", 4 << 20),
        ("-b 8192", 700 << 10),
    ] {
        assert_same_layout_as_mke2fs(arguments, kib);
    }
}

#[test]
#[ignore = "long: a minute: many sizes"]
fn small_journaled_volumes_equal_mke2fs_byte_for_byte() {
    for kind in ["ext3", "ext4"] {
        for size in [100, 1440, 2047, 2048, 3000, 8192, 8300, 9000, 16384, 20000, 40000, 65536] {
            assert_same_layout_as_mke2fs(&format!("-t {kind}"), size);
        }
    }
    for (arguments, size) in [
        ("-t ext3 -b 4096", 20000),
        ("-t ext3 -b 2048 -J size=4", 30000),
        ("-t ext3 -b 1024 -J size=3", 30000),
        ("-t ext4 -b 4096", 40000),
        ("-t ext4 -b 2048 -I 128", 40000),
        ("-t ext4 -b 4096 -I 1024 -N 2000", 60000),
        ("-t ext4 -b 1024 -J size=3", 30000),
        ("-t ext4 -O ^has_journal", 30000),
        ("-t ext4 -O ^flex_bg", 65536),
        ("-t ext4 -O ^metadata_csum", 65536),
        ("-t ext4 -O ^metadata_csum,uninit_bg", 65536),
        ("-t ext4 -O ^metadata_csum,uninit_bg,^flex_bg", 65536),
        ("-t ext4 -O ^64bit", 65536),
        ("-t ext4 -O ^64bit,^extent", 65536),
        ("-t ext4 -O metadata_csum_seed", 30000),
        ("-t ext4 -O orphan_file", 30000),
        ("-t ext4 -O sparse_super2,^resize_inode", 65536),
        ("-t ext4 -O sparse_super2", 65536),
        ("-t ext4 -O meta_bg,^resize_inode", 65536),
        ("-t ext4 -O large_dir,verity,fast_commit,stable_inodes", 65536),
        ("-t ext4 -O ^resize_inode,^huge_file,^dir_nlink,^extra_isize", 65536),
        ("-t ext4 -O encrypt,ea_inode,project", 20000),
        ("-t ext4 -O casefold", 20000),
        ("-t ext4 -G 4", 65536),
        ("-t ext4 -G 1", 65536),
        ("-t ext4 -G 64", 65536),
        ("-t ext4 -i 1024", 65536),
        ("-t ext4 -N 30000", 65536),
        ("-t ext4 -E stride=8,stripe_width=32", 65536),
        ("-t ext4 -E packed_meta_blocks", 65536),
        ("-t ext4 -E resize=1000000", 65536),
        ("-t ext4 -E num_backup_sb=1 -O sparse_super2", 65536),
        ("-t ext4 -m 1 -L label", 65536),
        ("-O extent,flex_bg,uninit_bg", 65536),
        ("-E stride=16", 65536),
    ] {
        assert_same_layout_as_mke2fs(arguments, size);
    }
}

#[test]
#[ignore = "long: half a minute: many sizes"]
fn large_journaled_volume_layout_matches_mke2fs() {
    for (arguments, kib) in [
        ("-t ext3", 300 << 10),
        ("-t ext3", 3 << 20),
        ("-t ext4", 200 << 10),
        ("-t ext4", 511 << 10),
        ("-t ext4", 600 << 10),
        ("-t ext4", 3 << 20),
        ("-t ext4", 20 << 20),
        ("-t ext4 -b 1024", 1 << 20),
        ("-t ext4 -b 1024 -i 1024", 1 << 20),
        ("-t ext4 -b 1024 -N 200000 -G 8", 700 << 10),
        ("-t ext4 -b 2048 -i 2048", 600 << 10),
        ("-t ext4 -O ^flex_bg", 3 << 20),
        ("-t ext4 -O meta_bg,^resize_inode", 20 << 20),
        ("-t ext4 -O meta_bg,^resize_inode -b 1024", 2 << 20),
        ("-t ext4 -O sparse_super2,orphan_file,metadata_csum_seed", 3 << 20),
        ("-t ext4 -E packed_meta_blocks", 3 << 20),
        ("-t ext4 -J size=400", 3 << 20),
        ("-t ext4", 130 << 20),
        ("-t ext4 -b 1024 -O ^flex_bg", 9 << 20),
    ] {
        assert_same_layout_as_mke2fs(arguments, kib);
    }
}

#[test]
fn invalid_options_are_refused_without_panic() {
    for (arguments, size) in [
        ("-b 1000", 8192),
        ("-b 512", 8192),
        ("-I 100", 8192),
        ("-I 4096 -b 1024", 8192),
        ("-i 5", 8192),
        ("-N 4000000000", 8192),
        ("-m 60", 8192),
        ("-L more_than_sixteen_letters", 8192),
        ("-b 1024", 1 << 40),
        ("", 0),
        ("-b 65536 -I 32768", u64::MAX >> 12),
        ("-N 0", 8192),
        ("-t ext4 -G 3", 8192),
        ("-t ext4 -G 0", 8192),
        ("-t ext4 -O ^extent", 8192),
        ("-t ext4 -O meta_bg", 8192),
        ("-t ext4 -O ^metadata_csum,metadata_csum_seed", 8192),
        ("-t ext4 -O ^has_journal,orphan_file", 8192),
        ("-t ext4 -O project -I 128", 8192),
        ("-t ext4 -b 4096 -J size=1", 8192 << 2),
        ("-t ext4 -J size=5", 8192),
        ("-t ext4 -E resize=1000", 8192),
        ("-t ext4", u64::MAX >> 20),
        ("-t ext4 -C 16384", 65536),
        ("-t ext4 -O bigalloc -C 3000", 65536),
        ("-t ext4 -O bigalloc -b 4096 -C 2048", 65536),
        ("-O bigalloc", 65536),
        ("-t ext4 -O inline_data -I 128", 65536),
        ("-t ext4 -O mmp -E mmp_update_interval=301", 65536),
        ("-t ext4 -I 128 -E quotatype=prjquota", 65536),
    ] {
        let layout = Layout::new(&parse_mke2fs_arguments(arguments), size.saturating_mul(1024));
        assert!(layout.is_err(), "{arguments} {size}");
    }
}

#[test]
fn too_large_trees_are_refused_before_writing() {
    let mut made = SyntheticTree::new();
    made.add_file_without_holes(NodeId::ROOT, "large", 4 << 20);
    let error = VolumePlan::new(Layout::new(&default_options(), 4 << 20).unwrap(), &mut made.tree)
        .unwrap_err();
    assert!(matches!(error, FormatError::NoBlocks { needed: 4127, free: ..4096, .. }), "{error}");
    let mut made = SyntheticTree::new();
    for nth in 0..100 {
        made.add_file_without_holes(NodeId::ROOT, &format!("{nth}"), 0);
    }
    let layout = Layout::new(&parse_mke2fs_arguments("-N 64"), 4 << 20).unwrap();
    let error = VolumePlan::new(layout, &mut made.tree).unwrap_err();
    assert!(matches!(error, FormatError::NoInodes { needed: 100, free: 53 }), "{error}");
    assert!(mkfs::plan_smallest(&parse_mke2fs_arguments("-N 64"), &mut made.tree, 0).is_err());
    mkfs::plan_smallest(&parse_mke2fs_arguments("-N 112"), &mut made.tree, 0).unwrap();
    // By default there are enough, even more than a volume of this size gets.
    for nth in 100..2000 {
        made.add_file_without_holes(NodeId::ROOT, &format!("{nth}"), 0);
    }
    assert!(
        VolumePlan::new(Layout::new(&default_options(), 4 << 20).unwrap(), &mut made.tree).is_err()
    );
    mkfs::plan_for_size(&default_options(), &mut made.tree, 4 << 20).unwrap();

    for (what, said) in [
        (NodeKind::Symlink(vec![b'x'; 1024]), "longer than a block"),
        (NodeKind::Symlink(vec![]), "without a target"),
        (NodeKind::File { size_bytes: 1 << 40, data: vec![], source: 0 }, "-b"),
    ] {
        let mut tree = empty_root_tree();
        tree.add(NodeId::ROOT, b"odd", TreeNode::new(what, 0)).unwrap();
        let error = VolumePlan::new(Layout::new(&default_options(), 4 << 20).unwrap(), &mut tree)
            .unwrap_err();
        assert!(error.to_string().starts_with("/odd: "), "{error}");
        assert!(error.to_string().contains(said), "{error}");
    }
    let mut tree = empty_root_tree();
    tree.add(NodeId::ROOT, b"lost+found", TreeNode::new(NodeKind::Fifo, 0)).unwrap();
    assert!(VolumePlan::new(Layout::new(&default_options(), 4 << 20).unwrap(), &mut tree).is_err());
    for name in [&b""[..], b".", b"..", b"a/b", b"nul\0", &[b'n'; 256]] {
        assert!(tree.add(NodeId::ROOT, name, TreeNode::new(NodeKind::Fifo, 0)).is_err());
    }
}

#[test]
fn contiguous_files_use_few_extents_and_fragmented_ones_extent_trees() {
    let mut made = SyntheticTree::new();
    // Holes in every second block: as many extents as blocks.
    let block = 1024;
    for (name, count) in [("few", 4), ("some", 5), ("many", 400), ("trees", 3000)] {
        let data = (0..count).map(|nth| (nth * 2 * block, nth * 2 * block + 1)).collect();
        made.add_file(NodeId::ROOT, name, count * 2 * block, data);
    }
    // Longer than a group, and than an extent.
    made.add_file_without_holes(NodeId::ROOT, "long", 50 << 20);
    // Backups in groups 3, 5, 7 and 9 and the maximum extent length split it.
    for (arguments, pieces) in [("-t ext4 -b 1024", 6), ("-t ext4 -b 1024 -O ^has_journal", 6)] {
        let options = parse_mke2fs_arguments(arguments);
        let image = Image::from_bytes(&[]);
        let mut tree = made.tree.clone();
        let layout = Layout::new(&options, 200 << 20).unwrap();
        write_image(&VolumePlan::new(layout, &mut tree).unwrap(), &made, &image.path).unwrap();
        assert_fsck_clean(&image.path);
        let shown = image.debugfs("dump_extents -l /long").unwrap();
        // One header line.
        let found = shown.trim().lines().count() - 1;
        assert!((2..=pieces).contains(&found), "{arguments}: {found} extents");
        assert_kernel_sees_tree(&image, &tree, &made);
        let volume = image.open();
        for (name, id) in tree.names(NodeId::ROOT) {
            if let NodeKind::File { source, data, .. } = &tree.node(id).kind_data {
                let inode = volume.lookup(volume.root(), name).unwrap();
                assert_same_contents(&volume, inode, &made, *source, data);
            }
        }
    }
}

#[test]
#[ignore = "long: half a minute: 65,000 directories"]
fn directories_may_exceed_link_count_limit() {
    let mut made = SyntheticTree::new();
    let top = made.add_directory(NodeId::ROOT, "top");
    for nth in 0..65_100 {
        made.add_directory(top, &format!("{nth}"));
    }
    let error =
        mkfs::plan_smallest(&parse_mke2fs_arguments("-b 4096"), &mut made.tree, 0).unwrap_err();
    assert!(error.to_string().contains("65000 links"), "{error}");
    let (mut tree, made) = split_tree_and_files(made);
    let image = Image::from_bytes(&[]);
    let plan =
        mkfs::plan_smallest(&parse_mke2fs_arguments("-t ext4 -b 4096"), &mut tree, 0).unwrap();
    write_image(&plan, &made, &image.path).unwrap();
    assert_fsck_clean(&image.path);
    let volume = image.open();
    let top = volume.lookup(volume.root(), b"top").unwrap();
    assert_eq!(volume.attributes(top).unwrap().links, 1);
}

#[test]
fn kernel_changes_formatted_volumes_of_every_kind() {
    for arguments in [
        "-t ext3 -b 1024",
        "-t ext4 -b 1024",
        "-t ext4 -b 4096 -O orphan_file,metadata_csum_seed,large_dir,fast_commit",
        "-t ext4 -b 1024 -O ^metadata_csum,uninit_bg",
        "-t ext4 -b 2048 -O meta_bg,^resize_inode,^has_journal",
        "-t ext4 -b 4096 -O sparse_super2,^flex_bg",
        "-t ext4 -b 1024 -O bigalloc,inline_data,orphan_file",
        "-t ext4 -b 4096 -O bigalloc,^has_journal,^flex_bg -C 16384",
        "-t ext4 -b 2048 -O mmp,uninit_bg,^metadata_csum -E mmp_update_interval=1",
    ] {
        let mut made = SyntheticTree::new();
        made.add_file_without_holes(NodeId::ROOT, "there", 3 << 20);
        let (mut tree, made) = split_tree_and_files(made);
        let image = Image::from_bytes(&[]);
        let layout = Layout::new(&parse_mke2fs_arguments(arguments), 100 << 20).unwrap();
        write_image(&VolumePlan::new(layout, &mut tree).unwrap(), &made, &image.path).unwrap();
        let Some(mount) = image.mount_writable() else { return };
        for nth in 0..300 {
            let dir = mount.path().join(format!("{}", nth % 20));
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join(format!("{nth}")), vec![7; nth * 500]).unwrap();
        }
        // An orphan, and a file in uninitialized groups.
        let held = std::fs::File::create(mount.path().join("held")).unwrap();
        held.set_len(40 << 20).unwrap();
        std::fs::write(mount.path().join("large"), vec![1; 40 << 20]).unwrap();
        std::fs::remove_file(mount.path().join("held")).unwrap();
        drop(held);
        std::fs::remove_file(mount.path().join("there")).unwrap();
        drop(mount);
        assert_fsck_clean(&image.path);
        let volume = image.open();
        let large = volume.lookup(volume.root(), b"large").unwrap();
        assert_eq!(volume.attributes(large).unwrap().size_bytes, 40 << 20);
    }
}

#[test]
fn failed_format_leaves_no_valid_volume() {
    let mut whole = None;
    for fails_at in 0.. {
        let mut made = SyntheticTree::new();
        made.add_file_without_holes(NodeId::ROOT, "large", 3 << 20);
        let (mut tree, made) = split_tree_and_files(made);
        let plan =
            VolumePlan::new(Layout::new(&default_options(), 12 << 20).unwrap(), &mut tree).unwrap();
        // A disk that held a volume before.
        let mut before = vec![0; 12 << 20];
        before[1080..1082].copy_from_slice(&[0x53, 0xEF]);
        let disk = FaultDisk::new(MemoryDisk::new(before, 512));
        disk.add_fault(FaultTarget::Request(fails_at), Fault::Fail);
        let target = FormatTarget { disk: &disk, zeroed: false, progress: &|_| {} };
        let done = mkfs::write(&plan, &made, &target);
        disk.clear_faults();
        let opened = Volume::open(std::sync::Arc::new(disk), draconis_ext::OpenOptions::default());
        if done.is_ok() {
            opened.unwrap();
            whole = Some(fails_at);
            break;
        }
        if fails_at > 0 {
            assert_eq!(opened.unwrap_err(), draconis_ext::Error::NotExt, "request {fails_at}");
        }
    }
    assert!(whole.is_some_and(|requests| requests > 8), "{whole:?}");
}

#[test]
fn file_source_error_names_file() {
    let mut tree = empty_root_tree();
    let what = NodeKind::File { size_bytes: 5, data: vec![(0, 5)], source: 0 };
    let dir = tree.add(NodeId::ROOT, b"dir", TreeNode::new(NodeKind::Directory, 0o755)).unwrap();
    tree.add(dir, b"file", TreeNode::new(what, 0o644)).unwrap();
    let image = Image::from_bytes(&[]);
    let plan = mkfs::plan_smallest(&default_options(), &mut tree, 0).unwrap();
    let error = write_image(&plan, &FailingFileSource, &image.path).unwrap_err();
    assert!(error.to_string().starts_with("/dir/file: "), "{error}");
    assert_eq!(image.try_open().unwrap_err(), draconis_ext::Error::NotExt);
}

#[test]
fn requested_free_space_is_left() {
    for free in [0, 1 << 20, 100 << 20] {
        let mut made = SyntheticTree::new();
        made.add_file_without_holes(NodeId::ROOT, "large", 3 << 20);
        let plan = mkfs::plan_smallest(&default_options(), &mut made.tree, free).unwrap();
        let super_ = plan.layout().superblock();
        let left = super_.free_blocks * u64::from(super_.block_bytes) - plan.data_bytes();
        let reserved = super_.reserved_blocks * u64::from(super_.block_bytes);
        assert!(left >= free && left < free + reserved + (1 << 20), "{free}: {left}");
    }
}

/// Random arguments; `DRACONIS_LAYOUTS=1000` tries more.
#[test]
#[ignore = "long: a minute: many sizes"]
fn random_size_layout_matches_mke2fs() {
    let count = std::env::var("DRACONIS_LAYOUTS").ok().and_then(|text| text.parse().ok());
    let mut random = Random::new(11);
    for _ in 0..count.unwrap_or(80) {
        let mut arguments =
            ["", "-t ext3 ", "-t ext4 ", "-t ext4 "][random.next_below(4) as usize].to_owned();
        let is_ext4 = arguments.contains("ext4");
        let block = 1024 << random.next_below(4);
        if random.next_below(3) > 0 {
            arguments += &format!("-b {block} ");
        }
        match random.next_below(5) {
            0 => arguments += &format!("-i {} ", 1024 << random.next_below(8)),
            1 => {
                let digits = 4 + random.next_below(14);
                arguments += &format!("-N {} ", 13 + random.next_below(1 << digits));
            }
            _ => {}
        }
        match random.next_below(6) {
            0 => arguments += "-I 128 ",
            1 => arguments += "-I 512 ",
            _ => {}
        }
        match random.next_below(6) {
            0 => arguments += "-O ^resize_inode ",
            1 => arguments += "-O ^resize_inode,^sparse_super ",
            2 if is_ext4 => arguments += "-O meta_bg,^resize_inode,orphan_file ",
            3 if is_ext4 => arguments += "-O sparse_super2,^metadata_csum,uninit_bg ",
            4 if is_ext4 && random.next_below(2) == 0 => arguments += "-O mmp,quota ",
            4 if is_ext4 => {
                arguments +=
                    &format!("-O bigalloc,quota -b 4096 -C {} ", 4096 << random.next_below(6));
            }
            _ => {}
        }
        if is_ext4 && random.next_below(3) == 0 {
            arguments += &format!("-G {} ", 1 << random.next_below(7));
        }
        let digits = 8 + random.next_below(12);
        let size = random.next_below(1 << digits) + 40;
        assert_same_layout_as_mke2fs(&arguments, size);
    }
}

#[test]
fn random_options_and_sizes_do_not_panic() {
    let mut random = Random::new(12);
    for _ in 0..3000 {
        let wild = |random: &mut Random| {
            let bits = random.next_below(64);
            random.next_u64() >> bits
        };
        let options = FormatOptions {
            block_bytes: (random.next_below(4) > 0).then(|| 512 << random.next_below(9)),
            inode_bytes: 64 << random.next_below(11),
            inodes: match random.next_below(3) {
                0 => InodeCount::Default,
                1 => InodeCount::PerBytes(wild(&mut random) as u32),
                _ => InodeCount::Count(wild(&mut random) as u32),
            },
            reserved_ppm: random.next_below(600_000) as u32,
            flex_groups: random.next_below(40) as u32,
            resize_blocks: (random.next_below(3) == 0).then(|| wild(&mut random)),
            backups: random.next_below(4) as u32,
            cluster_bytes: (random.next_below(9) == 0).then(|| 1 << random.next_below(32)),
            ..parse_mke2fs_arguments(
                [
                    "",
                    "-t ext3",
                    "-t ext4",
                    "-t ext4 -O sparse_super2,meta_bg,^resize_inode",
                    "-t ext4 -O bigalloc,quota,mmp,inline_data",
                ][random.next_below(5) as usize],
            )
        };
        let size = wild(&mut random);
        let Ok(layout) = Layout::new(&options, size) else { continue };
        let super_ = layout.superblock();
        assert!(super_.len_bytes() <= size && super_.free_blocks < super_.blocks);
        assert!(super_.inodes >= 11);
        let all = super_.overhead() + super_.free_blocks;
        assert!(if super_.cluster_blocks > 1 {
            all <= super_.blocks
        } else {
            all == super_.blocks
        });
        if super_.groups < 5000 {
            let mut tree = empty_root_tree();
            let _ = VolumePlan::new(layout, &mut tree);
        }
    }
}

#[test]
fn old_data_on_disk_does_not_change_volume() {
    for arguments in ["", "-t ext4 -O orphan_file", "-t ext3"] {
        let mut images = vec![];
        for old in [0, 0xA5] {
            let (mut tree, made) = split_tree_and_files(build_boundary_tree(9, 1024));
            let layout = Layout::new(&parse_mke2fs_arguments(arguments), 60 << 20).unwrap();
            let plan = VolumePlan::new(layout, &mut tree).unwrap();
            let disk = MemoryDisk::new(vec![old; 60 << 20], 512);
            let target = FormatTarget { disk: &disk, zeroed: old == 0, progress: &|_| {} };
            mkfs::write(&plan, &made, &target).unwrap();
            let image = Image::from_bytes(&disk.into_bytes());
            assert_fsck_clean(&image.path);
            assert_volume_matches_tree(&image, &tree, &made);
            images.push(image);
        }
        // All used bytes are equal; the rest is old data.
        assert_eq!(
            dumpe2fs_without_ignored_fields(&images[0]),
            dumpe2fs_without_ignored_fields(&images[1])
        );
    }
}
