//! Volumes made of trees: contents checked by us, `e2fsck` and the kernel.

use super::*;

/// A tree of synthetic files, whose contents follow from their numbers.
pub struct SyntheticTree {
    pub tree: Tree,
    /// Data ranges by source number.
    pub files: Vec<Vec<(u64, u64)>>,
}

/// Returns the byte at an offset of a file.
fn synthetic_byte(source: u64, at: u64) -> u8 {
    let mixed =
        (source + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (at / 61).wrapping_mul(0xC2B2_AE35);
    (mixed >> 13) as u8 | 1
}

impl FileSource for SyntheticTree {
    fn read(&self, source: u64, at_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        for (start, end) in &self.files[source as usize] {
            let (from, to) = ((*start).max(at_bytes), (*end).min(at_bytes + into.len() as u64));
            for at in from..to {
                into[(at - at_bytes) as usize] = synthetic_byte(source, at);
            }
        }
        Ok(())
    }
}

/// A source that must be read sequentially.
struct SequentialFileSource(SyntheticTree, std::sync::Mutex<(u64, u64)>);

impl FileSource for SequentialFileSource {
    fn read(&self, source: u64, at_bytes: u64, into: &mut [u8]) -> std::io::Result<()> {
        let mut reached = self.1.lock().unwrap();
        assert!(*reached <= (source, at_bytes), "{reached:?}, then {source} {at_bytes}");
        *reached = (source, at_bytes + into.len() as u64);
        self.0.read(source, at_bytes, into)
    }

    fn is_sequential(&self) -> bool {
        true
    }
}

#[test]
fn sequential_source_gives_same_volume() {
    for arguments in ["-b 1024", "-t ext4 -b 4096", "-t ext4 -b 1024 -O inline_data,bigalloc"] {
        let mut images = vec![];
        for in_order in [false, true] {
            let (mut tree, made) = split_tree_and_files(build_boundary_tree(8, 1024));
            let plan =
                mkfs::plan_smallest(&parse_mke2fs_arguments(arguments), &mut tree, 0).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("image");
            match in_order {
                true => write_image(&plan, &SequentialFileSource(made, Default::default()), &path)
                    .unwrap(),
                false => write_image(&plan, &made, &path).unwrap(),
            }
            images.push(Image { dir, path });
        }
        assert_fsck_clean(&images[1]);
        assert_same_bytes(&images[1], &images[0], arguments);
    }
}

/// Splits off the contents, because the plan borrows the tree.
pub fn split_tree_and_files(made: SyntheticTree) -> (Tree, SyntheticTree) {
    (made.tree, SyntheticTree { tree: empty_root_tree(), files: made.files })
}

impl SyntheticTree {
    pub fn new() -> Self {
        Self { tree: empty_root_tree(), files: vec![] }
    }

    pub fn add_file(
        &mut self,
        dir: NodeId,
        name: &str,
        size: u64,
        data: Vec<(u64, u64)>,
    ) -> NodeId {
        let source = self.files.len() as u64;
        self.files.push(data.clone());
        let mut node = TreeNode::new(NodeKind::File { size_bytes: size, data, source }, 0o644);
        node.uid = 70_000 + source as u32;
        node.gid = source as u32;
        node.modified = Time { seconds: 4_000_000_000 + source as i64, nanoseconds: 123_456_789 };
        node.accessed = Time { seconds: -5, nanoseconds: 1 };
        self.tree.add(dir, name.as_bytes(), node).unwrap()
    }

    pub fn add_file_without_holes(&mut self, dir: NodeId, name: &str, size: u64) -> NodeId {
        let data = if size > 0 { vec![(0, size)] } else { vec![] };
        self.add_file(dir, name, size, data)
    }

    pub fn add_directory(&mut self, dir: NodeId, name: &str) -> NodeId {
        self.tree.add(dir, name.as_bytes(), TreeNode::new(NodeKind::Directory, 0o750)).unwrap()
    }
}

/// Makes files at every boundary of the map, and directories of many sizes.
pub fn build_boundary_tree(seed: u64, block: u64) -> SyntheticTree {
    let mut made = SyntheticTree::new();
    let mut random = Random::new(seed);
    let fan_out = block / 4;
    let edges = [0, 1, block, 12 * block, (12 + fan_out) * block, 1 << 20];
    for edge in edges {
        for size in [edge.saturating_sub(1), edge, edge + 1] {
            made.add_file_without_holes(NodeId::ROOT, &format!("size {size}"), size);
        }
    }
    let double = (12 + fan_out + fan_out * fan_out) * block;
    for (name, size, data) in [
        ("at the triple edge", double + 100, vec![(double - block, double + 100)]),
        ("triple", double * 2, vec![(0, 1), (double, double + 1), (double * 2 - 5, double * 2)]),
        ("all hole", 1 << 26, vec![]),
        ("shared block", 10 * block, vec![(5, 9), (block - 3, block + 3), (block + 7, block + 9)]),
    ] {
        made.add_file(NodeId::ROOT, name, size, data);
    }
    let mut dirs = vec![NodeId::ROOT];
    for nth in 0..40 {
        let above = dirs[random.next_below(dirs.len() as u64) as usize];
        let dir = made.add_directory(above, &format!("directory {nth}"));
        dirs.push(dir);
        for nth in 0..random.next_below(2) * random.next_below(150) {
            let size = random.next_below(5) * random.next_below(9000);
            let name = format!("{nth} {}", "n".repeat(random.next_below(200) as usize));
            let id = made.add_file_without_holes(dir, &name, size);
            if random.next_below(10) == 0 {
                let home = dirs[random.next_below(dirs.len() as u64) as usize];
                made.tree.link(home, format!("link {nth} {size}").as_bytes(), id).unwrap();
            }
        }
    }
    add_special_files(&mut made);
    made
}

fn add_special_files(made: &mut SyntheticTree) {
    let dir = made.add_directory(NodeId::ROOT, "special");
    for (name, what) in [
        ("fifo", NodeKind::Fifo),
        ("socket", NodeKind::Socket),
        ("character", NodeKind::CharDevice(5, 1)),
        ("block", NodeKind::BlockDevice(259, 70_000)),
        ("short", NodeKind::Symlink(vec![b't'; 59])),
        ("long", NodeKind::Symlink(vec![b't'; 60])),
        ("longest", NodeKind::Symlink(vec![b't'; 1023])),
    ] {
        made.tree.add(dir, name.as_bytes(), TreeNode::new(what, 0o640)).unwrap();
    }
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in [(1u16, 6u16, !0u32), (2, 4, 1000), (4, 4, !0), (16, 6, !0), (32, 0, !0)]
    {
        list.extend(tag.to_le_bytes());
        list.extend(perm.to_le_bytes());
        list.extend(id.to_le_bytes());
    }
    for nth in 0..1500 {
        // More inodes than may share one xattr block.
        let id = made.add_file_without_holes(dir, &format!("attributes {nth}"), 0);
        let node = made.tree.node_mut(id).unwrap();
        assert!(node.set_xattr(b"user.shared", &[b'v'; 300]));
        assert!(node.set_xattr(b"system.posix_acl_access", &list));
        assert!(node.set_xattr(b"security.small", b"fits"));
        assert!(!node.set_xattr(b"btrfs.compression", b"zlib"));
    }
    let id = made.add_file_without_holes(dir, "own attributes", 10);
    let node = made.tree.node_mut(id).unwrap();
    for (name, value) in
        [(&b"user.empty"[..], &b""[..]), (b"trusted.t", b"123"), (b"user.b", b"old")]
    {
        assert!(node.set_xattr(name, value));
    }
    assert!(node.set_xattr(b"user.b", &[7; 600]));
}

/// Compares a volume with its source tree, through our reader.
pub fn assert_volume_matches_tree(image: &Image, tree: &Tree, made: &SyntheticTree) {
    let volume = image.open();
    let mut stack = vec![(NodeId::ROOT, volume.root())];
    while let Some((dir, inode)) = stack.pop() {
        let ours = crate::common::compare::list_names(&volume, inode);
        let expected: Vec<_> = tree.names(dir).collect();
        assert!(ours.keys().map(|name| &name[..]).eq(expected.iter().map(|it| it.0)));
        for (name, id) in expected {
            let inode = volume.lookup(inode, name).unwrap();
            let node = tree.node(id);
            let found = volume.attributes(inode).unwrap();
            assert_eq!(found.kind, node.kind_data.kind());
            assert_eq!(found.mode & 0o7777, u32::from(node.mode));
            assert_eq!((found.uid, found.gid), (node.uid, node.gid));
            if volume.superblock().inode_bytes > 128 {
                assert_eq!((found.modified, found.accessed), (node.modified, node.accessed));
            }
            match &node.kind_data {
                NodeKind::Directory => stack.push((id, inode)),
                NodeKind::File { size_bytes, source, data } => {
                    assert_eq!(found.size_bytes, *size_bytes);
                    assert_same_contents(&volume, inode, made, *source, data);
                }
                NodeKind::Symlink(target) => assert_eq!(volume.read_link(inode).unwrap(), *target),
                NodeKind::CharDevice(major, minor) | NodeKind::BlockDevice(major, minor) => {
                    assert_eq!(found.device, (*major, *minor));
                }
                _ => {}
            }
        }
    }
    let own = volume.resolve(volume.root(), b"special/own attributes", Follow::No).unwrap();
    assert_eq!(volume.xattr(own, b"user.b").unwrap(), [7; 600]);
    assert_eq!(volume.xattr(own, b"user.empty").unwrap(), b"");
    for nth in [0, 1023, 1024, 1499] {
        let path = format!("special/attributes {nth}");
        let inode = volume.resolve(volume.root(), path.as_bytes(), Follow::No).unwrap();
        assert_eq!(volume.xattr(inode, b"user.shared").unwrap(), [b'v'; 300]);
        assert_eq!(volume.xattr(inode, b"system.posix_acl_access").unwrap().len(), 44);
        assert_eq!(volume.xattr(inode, b"security.small").unwrap(), b"fits");
    }
}

pub fn assert_same_contents(
    volume: &draconis_ext::Volume,
    inode: draconis_ext::InodeNumber,
    made: &SyntheticTree,
    source: u64,
    data: &[(u64, u64)],
) {
    for (start, end) in data {
        let from = start.saturating_sub(100);
        let mut bytes = vec![9; (end - from) as usize];
        volume.read_into(inode, from, &mut bytes).unwrap();
        let mut expected = vec![0; bytes.len()];
        made.read(source, from, &mut expected).unwrap();
        assert!(bytes == expected, "file {source} from {from}");
    }
}

/// Compares the kernel's view of the same files.
pub fn assert_kernel_sees_tree(image: &Image, tree: &Tree, made: &SyntheticTree) {
    let Some(mount) = image.mount() else { return };
    for (name, id) in tree.names(NodeId::ROOT) {
        let NodeKind::File { size_bytes, source, data } = &tree.node(id).kind_data else {
            continue;
        };
        let path = mount.path().join(std::str::from_utf8(name).unwrap());
        let file = std::fs::File::open(path).unwrap();
        assert_eq!(file.metadata().unwrap().len(), *size_bytes);
        for (start, end) in data {
            let mut bytes = vec![0; (end - start) as usize];
            std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, *start).unwrap();
            let mut expected = vec![0; bytes.len()];
            made.read(*source, *start, &mut expected).unwrap();
            assert!(bytes == expected, "{}", String::from_utf8_lossy(name));
        }
    }
    let volume = image.open();
    // The longest file has gigabytes of holes with larger blocks, so check one size only.
    if volume.superblock().block_bytes == 1024 {
        crate::common::compare::compare_trees(
            &volume,
            InodeNumber::ROOT,
            mount.path(),
            ReferenceTree::Mount,
        );
    }
}

fn format_and_verify_tree(arguments: &str, seed: u64) {
    let options = parse_mke2fs_arguments(arguments);
    let block = u64::from(options.block_bytes.unwrap());
    let (mut tree, made) = split_tree_and_files(build_boundary_tree(seed, block));
    let image = Image::from_bytes(&[]);
    let plan = mkfs::plan_smallest(&options, &mut tree, 0).unwrap();
    write_image(&plan, &made, &image.path).unwrap();
    let hidden = plan.system_file_bytes();
    let free = plan.layout().superblock().free_blocks * block - plan.data_bytes() - hidden;
    // The smallest volume with a journal has space left.
    assert!(free < 1 << 20 || image.path.metadata().unwrap().len() == 2048 * block);
    assert_fsck_clean(&image.path);
    assert_volume_matches_tree(&image, &tree, &made);
    assert_kernel_sees_tree(&image, &tree, &made);
    // Again with more space: other locations, same files; and twice the same bytes.
    let size = image.path.metadata().unwrap().len() + (80 << 20);
    let mut images = vec![];
    for _ in 0..2 {
        let image = Image::from_bytes(&[]);
        let layout = Layout::new(&options, size).unwrap();
        write_image(&VolumePlan::new(layout, &mut tree).unwrap(), &made, &image.path).unwrap();
        images.push(image);
    }
    assert_fsck_clean(&images[0]);
    assert_volume_matches_tree(&images[0], &tree, &made);
    assert!(run_tool("cmp", &[images[0].path(), images[1].path()]).is_some());
}

#[test]
fn boundary_trees_on_1k_blocks() {
    format_and_verify_tree("-b 1024", 1);
}

#[test]
fn boundary_trees_on_2k_blocks() {
    format_and_verify_tree("-b 2048 -O ^dir_index", 2);
}

#[test]
fn boundary_trees_on_4k_blocks() {
    format_and_verify_tree("-b 4096 -I 512", 3);
}

#[test]
fn boundary_trees_on_small_inodes_without_filetype() {
    format_and_verify_tree("-b 4096 -I 128 -O ^filetype,^resize_inode", 4);
}

#[test]
fn boundary_trees_on_ext3() {
    format_and_verify_tree("-t ext3 -b 1024", 5);
}

#[test]
fn boundary_trees_on_ext4() {
    format_and_verify_tree("-t ext4 -b 1024", 6);
}

#[test]
fn boundary_trees_on_ext4_with_4k_blocks() {
    format_and_verify_tree("-t ext4 -b 4096 -O orphan_file,metadata_csum_seed,sparse_super2", 7);
}

#[test]
fn boundary_trees_on_ext4_with_few_features() {
    format_and_verify_tree(
        "-t ext4 -b 2048 -I 128 -O ^has_journal,^flex_bg,^64bit,^metadata_csum,uninit_bg",
        8,
    );
}

#[test]
fn boundary_trees_with_meta_bg_and_packed_tables() {
    format_and_verify_tree("-t ext4 -b 1024 -G 4 -O meta_bg,^resize_inode,^extra_isize", 9);
    format_and_verify_tree("-t ext4 -b 4096 -E packed_meta_blocks -O ^has_journal", 10);
}

#[test]
fn boundary_trees_with_bigalloc_and_quota() {
    format_and_verify_tree("-t ext4 -b 1024 -i 4096 -O bigalloc -C 4096", 11);
    format_and_verify_tree("-t ext4 -b 4096 -i 8192 -O bigalloc,quota,project", 12);
    format_and_verify_tree("-t ext3 -b 1024 -O quota", 13);
}

#[test]
fn boundary_trees_with_inline_data() {
    format_and_verify_tree("-t ext4 -b 1024 -O inline_data,quota", 14);
    format_and_verify_tree("-t ext4 -b 4096 -I 1024 -i 8192 -O inline_data,bigalloc,mmp", 15);
}

#[test]
#[ignore = "long: minutes: directories of up to 285,000 names"]
fn large_directories_with_every_hash_version() {
    for (kind, block, version, count, levels) in [
        ("ext2", 1024, 0, 9_000, 1),
        ("ext2", 1024, 2, 20_000, 1),
        ("ext2", 4096, 1, 60_000, 1),
        ("ext4", 1024, 1, 20_000, 1),
        ("ext4", 4096, 1, 60_000, 1),
        ("large", 1024, 1, 285_000, 2),
    ] {
        let mut made = SyntheticTree::new();
        let dir = made.add_directory(NodeId::ROOT, "large");
        let mut random = Random::new(version);
        let names: Vec<String> =
            (0..count).map(|nth| format!("{:032x}-{nth}", random.next_u64())).collect();
        for name in &names {
            made.add_file_without_holes(dir, name, 0);
        }
        let mut options = match kind {
            "large" => parse_mke2fs_arguments("-t ext4 -O large_dir"),
            kind => parse_mke2fs_arguments(&format!("-t {kind}")),
        };
        (options.block_bytes, options.hash_version) = (Some(block), version as u8);
        let image = Image::from_bytes(&[]);
        let (mut tree, made) = split_tree_and_files(made);
        write_image(
            &mkfs::plan_smallest(&options, &mut tree, 1 << 20).unwrap(),
            &made,
            &image.path,
        )
        .unwrap();
        assert_fsck_clean(&image.path);
        let volume = image.open();
        let large = volume.lookup(volume.root(), b"large").unwrap();
        let dump = image.debugfs("htree_dump /large").unwrap();
        assert!(
            dump.contains(&format!("Indirect levels: {levels}")),
            "{}",
            &dump[..300.min(dump.len())]
        );
        for name in &names {
            volume.lookup(large, name.as_bytes()).unwrap();
        }
        let Some(mount) = image.mount_writable() else { continue };
        let dir = mount.path().join("large");
        for name in &names {
            assert!(std::fs::symlink_metadata(dir.join(name)).is_ok(), "{name}");
        }
        assert!(std::fs::symlink_metadata(dir.join("no such name")).is_err());
        // The kernel continues on our volume.
        for nth in 0..40 {
            std::fs::write(dir.join(format!("new {nth}")), b"").unwrap();
        }
        for name in names.iter().step_by(7) {
            std::fs::remove_file(dir.join(name)).unwrap();
        }
        drop(mount);
        assert_fsck_clean(&image.path);
    }
}
