//! Combinations of features, one per line, and known failures.
//!
//! ```text
//! options of mke2fs [: options of tune2fs before the volume is filled]
//!                   [| options of tune2fs afterwards]
//! ```

/// Every feature by itself, and with its usual companions.
#[rustfmt::skip]
pub const COMBINATIONS: &[&str] = &[
    // MMP waits longest, so these go first.
    "-t ext4 -b 4096 -O mmp",
    "-t ext2 -b 1024 -O mmp",
    // ext2.
    "-t ext2 -b 1024",
    "-t ext2 -b 2048",
    "-t ext2 -b 4096",
    "-t ext2 -b 1024 -I 128",
    "-t ext2 -b 2048 -I 512",
    "-t ext2 -b 4096 -I 1024",
    "-t ext2 -b 1024 -r 0 -O none",
    "-t ext2 -b 2048 -O ^dir_index,^filetype,^sparse_super,^resize_inode",
    "-t ext2 -b 1024 -O sparse_super2,^resize_inode",
    "-t ext2 -b 1024 -O meta_bg,^resize_inode -g 1024",
    "-t ext2 -b 2048 -O flex_bg -G 4",
    "-t ext2 -b 1024 -O uninit_bg",
    "-t ext2 -b 4096 -O metadata_csum",
    "-t ext2 -b 1024 -O metadata_csum,metadata_csum_seed,^resize_inode",
    "-t ext2 -b 4096 -O extent",
    "-t ext2 -b 1024 -O extent,metadata_csum",
    "-t ext2 -b 1024 -O extent,uninit_bg,flex_bg",
    "-t ext2 -b 2048 -O inline_data -I 256",
    "-t ext2 -b 4096 -O ea_inode",
    "-t ext2 -b 1024 -O large_dir",
    "-t ext2 -b 4096 -O encrypt",
    "-t ext2 -b 1024 -O huge_file,extra_isize,dir_nlink,large_file",
    "-t ext2 -b 4096 -O stable_inodes",
    "-t ext2 -b 2048 | -O quota",
    "-t ext2 -b 4096 | -O project,quota -Q usrquota,grpquota,prjquota",
    "-t ext2 -b 1024 : -E hash_alg=tea",
    "-t ext2 -b 1024 : -E hash_alg=legacy",
    // ext3.
    "-t ext3 -b 1024",
    "-t ext3 -b 2048 -I 128",
    "-t ext3 -b 4096",
    "-t ext3 -b 1024 -O uninit_bg,flex_bg",
    "-t ext3 -b 4096 -O metadata_csum",
    "-t ext3 -b 1024 -O orphan_file",
    "-t ext3 -b 4096 -O fast_commit",
    "-t ext3 -b 2048 -O meta_bg,^resize_inode,dir_nlink,huge_file,extra_isize -I 512",
    "-t ext3 -b 1024 | -O ^has_journal",
    "-t ext3 -b 1024 : -O extent,uninit_bg,dir_index",
    // ext4, also with one feature less or more.
    "-t ext4 -b 1024",
    "-t ext4 -b 2048",
    "-t ext4 -b 4096",
    "-t ext4 -b 1024 -I 128",
    "-t ext4 -b 4096 -I 512",
    "-t ext4 -b 2048 -I 1024",
    "-t ext4 -b 4096 -O ^64bit",
    "-t ext4 -b 4096 -O ^metadata_csum",
    "-t ext4 -b 1024 -O ^metadata_csum,^64bit",
    "-t ext4 -b 1024 -O ^metadata_csum,uninit_bg",
    "-t ext4 -b 4096 -O ^has_journal",
    "-t ext4 -b 1024 -O ^flex_bg",
    "-t ext4 -b 4096 -O ^extent,^64bit",
    "-t ext4 -b 1024 -O ^dir_index,^extra_isize",
    "-t ext4 -b 4096 -O ^huge_file,^dir_nlink,^ext_attr",
    "-t ext4 -b 4096 -O meta_bg,^resize_inode",
    "-t ext4 -b 1024 -O meta_bg,^resize_inode,^flex_bg -g 1024",
    "-t ext4 -b 1024 -O meta_bg,^resize_inode,^metadata_csum,uninit_bg -g 2048",
    "-t ext4 -b 4096 -O metadata_csum_seed",
    "-t ext4 -b 1024 -O metadata_csum_seed | -U random",
    "-t ext4 -b 1024 -O inline_data",
    "-t ext4 -b 4096 -O inline_data -I 512",
    "-t ext4 -b 2048 -O inline_data -I 1024",
    "-t ext4 -b 4096 -O inline_data,^metadata_csum",
    "-t ext4 -b 4096 -O inline_data,ea_inode",
    "-t ext4 -b 1024 -O large_dir",
    "-t ext4 -b 1024 -O ea_inode",
    "-t ext4 -b 4096 -O ea_inode,^metadata_csum",
    "-t ext4 -b 4096 -O bigalloc -C 16384",
    "-t ext4 -b 1024 -O bigalloc -C 4096",
    "-t ext4 -b 2048 -O bigalloc,^has_journal -C 32768",
    "-t ext4 -b 4096 -O bigalloc,inline_data,^metadata_csum -C 65536",
    "-t ext4 -b 4096 -O sparse_super2",
    "-t ext4 -b 1024 -O sparse_super2,^resize_inode",
    "-t ext4 -b 4096 -O orphan_file",
    "-t ext4 -b 4096 -O fast_commit",
    "-t ext4 -b 1024 -O fast_commit,^metadata_csum",
    "-t ext4 -b 4096 | -O quota",
    "-t ext4 -b 4096 | -O project,quota -Q usrquota,grpquota,prjquota",
    "-t ext4 -b 1024 -I 512 | -O project",
    "-t ext4 -b 4096 -O verity",
    "-t ext4 -b 1024 -O verity",
    "-t ext4 -b 4096 -O encrypt",
    "-t ext4 -b 1024 -O encrypt,stable_inodes,inline_data",
    "-t ext4 -b 4096 -O casefold",
    "-t ext4 -b 1024 -O casefold,^metadata_csum",
    "-t ext4 -b 4096 -E packed_meta_blocks=1",
    "-t ext4 -b 1024 -G 1",
    "-t ext4 -b 4096 -E root_owner=1000:1000 -m 20 -L labelled",
    "-t ext4 -b 4096 : -E hash_alg=tea",
    "-t ext4 -b 1024 : -O ^dir_index",
    "-t ext4 -b 4096 -O ^metadata_csum | -O metadata_csum",
    "-t ext4 -b 4096 -O ^metadata_csum,uninit_bg : -O ^uninit_bg",
    "-t ext4 -b 4096 -O ^flex_bg,^metadata_csum | -I 512",
    "-t ext4 -b 4096 | -O ^metadata_csum",
    "-t ext4 -b 4096 -O inline_data,ea_inode,large_dir,metadata_csum_seed,orphan_file,encrypt,stable_inodes,verity -I 512",
    // Blocks larger than the pages of most machines.
    "-t ext4 -b 8192",
    "-t ext4 -b 16384 -O bigalloc -C 65536",
    "-t ext4 -b 32768 -O ^metadata_csum",
    "-t ext4 -b 65536",
    "-t ext4 -b 65536 -O inline_data -I 1024",
    "-t ext3 -b 8192",
    "-t ext2 -b 65536",
];

/// Features, combinations and journals (`line ; options ; shutdown`) that we do not read like the
/// kernel, with reasons. A line that reads correctly fails the test until it is removed.
pub const KNOWN_FAILURES: &[(&str, &str)] = &[];

/// Returns the line that makes the combination unreadable, if any.
pub fn find_known_failure<'a>(
    name: &str,
    mut has: impl FnMut(&str) -> bool,
) -> Option<&'a (&'static str, &'static str)> {
    KNOWN_FAILURES.iter().find(|(key, _)| *key == name || has(key))
}
