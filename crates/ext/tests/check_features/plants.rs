//! Problems that only ext3 and ext4 volumes can have, each planted: the checker finds it, and the
//! verdict is that of e2fsck.

use draconis_ext::check::What;
use draconis_ext::format::group::GroupDescriptor;

use crate::parts::{Base, ChecksumOwner, Part};

const ENCRYPTED: u32 = 0x800;
const EXTENTS: u32 = 0x8_0000;
const VALUE: u32 = 0x20_0000;
const INLINE: u32 = 0x1000_0000;

/// Volume, expected problem, and change.
type Plant = (&'static str, What, fn(&mut Changed<'_>));

/// A volume that is being changed.
pub struct Changed<'a> {
    pub base: &'a Base,
    pub image: Vec<u8>,
}

impl Changed<'_> {
    fn part(&self, what: &str) -> Part {
        self.base.parts.iter().find(|part| part.what == what).expect(what).clone()
    }

    /// Returns an inode whose bytes satisfy `is`.
    fn inode(&self, is: impl Fn(&[u8]) -> bool) -> Part {
        let mut inodes = self.base.parts.iter().filter(|part| {
            part.what == "inode"
                && part.range.len() > 128
                && !matches!(part.seal, ChecksumOwner::Inode(..11))
        });
        inodes.find(|part| is(&self.image[part.range.clone()])).expect("an inode").clone()
    }

    fn flip(&mut self, part: &Part, at: usize, sealed: bool) {
        self.image[part.range.start + at] ^= 1;
        if sealed {
            self.base.set_checksum(&mut self.image, part);
        }
    }

    fn put(&mut self, part: &Part, at: usize, bytes: &[u8]) {
        let at = part.range.start + at;
        self.image[at..at + bytes.len()].copy_from_slice(bytes);
        self.base.set_checksum(&mut self.image, part);
    }

    fn clear_flag(&mut self, part: &Part, flag: u32) {
        let flags = flags(&self.image[part.range.clone()]) & !flag;
        self.put(part, 32, &flags.to_le_bytes());
    }

    fn change_group(&mut self, change: impl FnOnce(&mut GroupDescriptor)) {
        self.base.change_group(&mut self.image, 0, |group, _| change(group));
    }
}

fn flags(inode: &[u8]) -> u32 {
    u32::from_le_bytes(inode[32..36].try_into().unwrap())
}

fn kind(inode: &[u8]) -> u8 {
    inode[1] >> 4
}

/// Options of the volumes.
pub const USUAL: &str = "-t ext4 -b 1024 -O orphan_file";
pub const GUARDED: &str = "-t ext4 -b 1024 -O mmp";
pub const CLUSTERS: &str = "-t ext4 -b 1024 -O bigalloc -C 4096";
pub const INSIDE: &str = "-t ext4 -b 1024 -O inline_data,ea_inode -I 256";
pub const SECRET: &str = "-t ext4 -b 1024 -O encrypt";
pub const COUNTED: &str = "-t ext4 -b 4096 | -O project,quota -Q usrquota,grpquota,prjquota";

/// All planted problems.
pub const PLANTS: &[Plant] = &[
    (USUAL, What::SuperblockChecksum, |it| it.image[1024 + 0x30] ^= 1),
    (USUAL, What::GroupChecksum, |it| {
        let part = it.part("descriptor");
        it.flip(&part, 0x1E, false);
    }),
    (USUAL, What::GroupUnused, |it| it.change_group(|group| group.unused_inodes = 60_000)),
    (USUAL, What::BlockBitmapChecksum, |it| {
        it.change_group(|group| group.bitmap_checksums[0] ^= 1)
    }),
    (USUAL, What::InodeBitmapChecksum, |it| {
        it.change_group(|group| group.bitmap_checksums[1] ^= 1)
    }),
    (USUAL, What::OrphanFile, |it| {
        let end = it.base.parts.iter().rfind(|part| part.what == "orphan file").unwrap().clone();
        let len = end.range.len();
        it.put(&end, len - 8, &[0; 4]);
    }),
    (USUAL, What::JournalNotEmpty, |it| {
        let part = it.part("journal");
        it.put(&part, 0x1C, &[0, 0, 0, 1]);
    }),
    (USUAL, What::InodeChecksum, |it| {
        let part = it.inode(|it| kind(it) == 8);
        it.flip(&part, 8, false);
    }),
    (USUAL, What::ExtentNode, |it| {
        let part = it.part("node");
        it.put(&part, 0, &[0, 0]);
    }),
    (USUAL, What::ExtentChecksum, |it| {
        let part = it.part("node");
        it.flip(&part, 8, false);
    }),
    (USUAL, What::ExtentStart, |it| {
        let root = it.inode(|it| kind(it) == 8 && flags(it) & EXTENTS != 0 && it[46] > 0);
        it.flip(&root, 40 + 12, true);
    }),
    (USUAL, What::ExtentFlag, |it| {
        let part = it.inode(|it| kind(it) == 8 && flags(it) & EXTENTS != 0);
        it.clear_flag(&part, EXTENTS);
    }),
    (USUAL, What::DirectoryUnwritten, |it| {
        let part = it.inode(|it| kind(it) == 4 && it[42] == 1 && it[46] == 0);
        let len = it.image[part.range.start + 40 + 12 + 4];
        it.put(&part, 40 + 12 + 4, &[len, 0x80]);
    }),
    (USUAL, What::DirectoryChecksum, |it| {
        let part =
            it.base.parts.iter().find(|part| part.what == "directory" && part.range.len() == 1024);
        let part = part.unwrap().clone();
        it.flip(&part, 1023, false);
    }),
    (USUAL, What::AttributeChecksum, |it| {
        let part = it.part("attributes");
        it.flip(&part, 16, false);
    }),
    (GUARDED, What::MmpBlock, |it| {
        let part = it.part("mmp");
        it.put(&part, 0, &[0; 4]);
    }),
    (CLUSTERS, What::Misaligned, |it| {
        let part = it.inode(|it| kind(it) == 8 && it[42] == 1 && it[46] == 0 && it[56] == 1);
        it.flip(&part, 40 + 12 + 8, true);
    }),
    (INSIDE, What::InlineData, |it| {
        let part = it.inode(|it| flags(it) & INLINE != 0);
        it.put(&part, 128 + 32, &[0; 4]);
    }),
    (INSIDE, What::AttributeValue, |it| {
        let part = it.inode(|it| flags(it) & VALUE != 0);
        it.clear_flag(&part, VALUE);
    }),
    (INSIDE, What::AttributeValueReferences, |it| {
        let part = it.inode(|it| flags(it) & VALUE != 0);
        it.put(&part, 36, &[77]);
    }),
    (SECRET, What::Encryption, |it| {
        let part = it.inode(|it| flags(it) & ENCRYPTED != 0);
        it.put(&part, 128 + 32, &[0; 4]);
    }),
    (SECRET, What::EntryEncryption, |it| {
        let part = it.inode(|it| flags(it) & ENCRYPTED != 0 && kind(it) == 8);
        it.clear_flag(&part, ENCRYPTED);
    }),
    (COUNTED, What::Quota, |it| {
        let is_leaf = |part: &&Part| {
            part.what == "quota" && it.image[part.range.start] != 0x11 && part.range.len() == 4096
        };
        let leaf = it.base.parts.iter().find(is_leaf).unwrap().clone();
        it.flip(&leaf, 1024 + 16 + 48, true);
    }),
];
