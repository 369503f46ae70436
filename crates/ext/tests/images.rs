//! Volumes of many kinds, compared with the kernel's view or their source tree.

use crate::common::compare::{self, ReferenceTree};
use crate::common::{Image, tree};
use draconis_ext::{BlockLocation, Error, Follow, InodeNumber, Seek};

/// Makes an image of the tree with all kinds of files and compares everything.
fn check(arguments: &[&str]) {
    let source = tempfile::tempdir().unwrap();
    tree::build_tree(source.path());
    let large = arguments.iter().any(|it| it.len() > 4 && it.parse::<u32>().is_ok());
    let size = if large { "96M" } else { "16M" };
    let Some(image) = Image::make(Some(source.path()), size, arguments) else { return };
    let volume = image.open();
    let count =
        compare::compare_trees(&volume, InodeNumber::ROOT, source.path(), ReferenceTree::Source);
    assert!(count > 400);
    if let Some(mount) = image.mount_large() {
        compare::compare_trees(&volume, InodeNumber::ROOT, mount.path(), ReferenceTree::Mount);
        compare::check_path_resolution(
            &volume,
            mount.path(),
            &["into", "into/d/e/../e/f/g", "a/b/c/", "many"],
        );
        compare_statfs(&volume, mount.path());
    }
    for (path, error) in [
        ("loop", Error::TooManyLinks),
        ("f1/", Error::NotADirectory),
        ("f1/x", Error::NotADirectory),
        ("nowhere", Error::NotFound),
        ("link1", Error::NotFound),
    ] {
        assert_eq!(volume.resolve(volume.root(), path.as_bytes(), Follow::Yes), Err(error));
    }
    let follow = volume.resolve(volume.root(), b"/absolute", Follow::Yes).unwrap();
    assert_eq!(follow, volume.resolve(volume.root(), b"a/b/c/d", Follow::No).unwrap());
}

fn compare_statfs(volume: &draconis_ext::Volume, mount: &std::path::Path) {
    let theirs = rustix::fs::statvfs(mount).unwrap();
    let ours = volume.space();
    assert_eq!(u64::from(ours.block_bytes), theirs.f_bsize);
    assert_eq!(
        (ours.blocks, ours.free_blocks, ours.available_blocks, ours.inodes, ours.free_inodes),
        (theirs.f_blocks, theirs.f_bfree, theirs.f_bavail, theirs.f_files, theirs.f_ffree)
    );
    assert_eq!(ours.id, theirs.f_fsid);
}

macro_rules! images {
    ($($name:ident: $($argument:literal)*;)*) => {
        $(#[test] fn $name() { check(&[$($argument),*]); })*
    };
}

images! {
    blocks_of_1k: "-b" "1024";
    blocks_of_2k: "-b" "2048";
    blocks_of_4k: "-b" "4096";
    blocks_of_8k: "-b" "8192";
    blocks_of_16k: "-b" "16384";
    blocks_of_32k: "-b" "32768";
    blocks_of_64k: "-b" "65536";
    inodes_of_128: "-b" "1024" "-I" "128";
    inodes_of_512: "-b" "2048" "-I" "512";
    inodes_of_1024: "-b" "4096" "-I" "1024";
    revision_0: "-b" "1024" "-r" "0" "-O" "none";
    no_filetype: "-b" "1024" "-O" "^filetype";
    no_sparse_super: "-b" "1024" "-O" "^sparse_super,^resize_inode" "-g" "1024";
    sparse_super2: "-b" "1024" "-O" "sparse_super2,^resize_inode" "-g" "1024";
    meta_bg: "-b" "1024" "-O" "meta_bg,^resize_inode" "-g" "256" "-N" "4096";
    small_groups: "-b" "1024" "-g" "512" "-N" "4096";
    journal: "-t" "ext3" "-b" "1024" "-J" "size=1";
    ext4_fields: "-b" "1024" "-O" "huge_file,dir_nlink,extra_isize,large_file" "-I" "256";
    uninit_groups: "-b" "1024" "-O" "uninit_bg";
    checksums: "-b" "1024" "-O" "metadata_csum,flex_bg";
    ext4: "-t" "ext4" "-b" "1024";
    ext4_of_4k: "-t" "ext4" "-b" "4096";
    ext4_of_64k: "-t" "ext4" "-b" "65536";
    ext4_of_32_bits: "-t" "ext4" "-b" "1024" "-O" "^64bit,^metadata_csum,uninit_bg";
    ext4_inodes_of_128: "-t" "ext4" "-b" "1024" "-I" "128";
    ext4_seeded: "-t" "ext4" "-b" "1024" "-O" "metadata_csum_seed,meta_bg,^resize_inode" "-g" "512";
    clusters: "-t" "ext4" "-b" "1024" "-O" "bigalloc" "-C" "8192";
}

#[test]
fn unsupported_features_are_refused_by_name() {
    let Some(image) = Image::make(None, "8M", &["-t", "ext4"]) else { return };
    image.debugfs_write("feature FEATURE_I30");
    assert_eq!(image.try_open().unwrap_err().to_string(), "needs: FEATURE_I30");
    let Some(image) = Image::make(None, "8M", &["-t", "ext2"]) else { return };
    image.debugfs_write("feature needs_recovery");
    let error = image.try_open().unwrap_err();
    assert!(error.to_string().starts_with("needs_recovery"), "{error}");
    let Some(image) = Image::make(None, "8M", &["-t", "ext4", "-O", "mmp"]) else { return };
    let why = image.open().read_only_reason().unwrap();
    assert!(why.starts_with("writing needs: mmp; "), "{why}");
}

#[test]
fn sparse_5_gib_file_with_triple_indirect_tail_is_read() {
    let source = tempfile::tempdir().unwrap();
    let path = source.path().join("sparse");
    let file = std::fs::File::create(&path).unwrap();
    let tail = 5u64 << 30;
    let spots = [3u64 << 20, (1 << 30) + 4096, tail];
    for at in spots {
        std::os::unix::fs::FileExt::write_all_at(&file, &tree::random_bytes(at, 9000), at).unwrap();
    }
    file.set_len(tail + (1 << 20)).unwrap();
    let Some(image) = Image::make(Some(source.path()), "16M", &["-b", "1024"]) else { return };
    let volume = image.open();
    let number = volume.lookup(volume.root(), b"sparse").unwrap();
    assert_eq!(volume.attributes(number).unwrap().size_bytes, tail + (1 << 20));

    let mut at = 0;
    for spot in spots {
        let start = volume.seek(number, at, Seek::Data).unwrap().unwrap();
        assert_eq!(start, spot);
        let mut bytes = vec![0; 9000];
        assert_eq!(volume.read_into(number, start, &mut bytes).unwrap(), 9000);
        assert!(bytes == tree::random_bytes(spot, 9000));
        at = volume.seek(number, start, Seek::Hole).unwrap().unwrap();
        assert_eq!(at, spot + 9 * 1024);
        let mut bytes = vec![1; 5000];
        assert_eq!(volume.read_into(number, at, &mut bytes).unwrap(), 5000);
        assert!(bytes.iter().all(|byte| *byte == 0));
    }
    assert_eq!(volume.seek(number, at, Seek::Data).unwrap(), None);
    assert_eq!(volume.seek(number, at, Seek::Hole).unwrap(), Some(at));

    // The map is the same, with few calls.
    let (mut at, mut calls, mut stored) = (0u64, 0, 0u64);
    loop {
        let runs = volume.map(number, at).unwrap();
        let Some(last) = runs.last() else { break };
        calls += 1;
        let there = runs.iter().filter(|run| matches!(run.location, BlockLocation::Mapped(_)));
        stored += there.map(|run| u64::from(run.blocks)).sum::<u64>();
        at = u64::from(last.end().0) * 1024;
    }
    assert_eq!(stored, 27);
    assert!(calls < 400, "{calls}");
    assert!(volume.statistics().device.bytes < 4 << 20, "{:?}", volume.statistics());
}
