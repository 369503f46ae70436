//! Problems that only ext3 and ext4 volumes can have, each planted: the checker finds it, and the
//! verdict is that of e2fsck.

use draconis_ext::check::What;
use draconis_ext::format::group::GroupDescriptor;

use crate::check_features::parts::{BaseVolume, ChecksumOwner, VolumeStructure};

const ENCRYPT_FLAG: u32 = 0x800;
const EXTENTS_FLAG: u32 = 0x8_0000;
const EA_INODE_FLAG: u32 = 0x20_0000;
const INLINE_DATA_FLAG: u32 = 0x1000_0000;

/// Volume, expected problem, and change.
type PlantedProblem = (&'static str, What, fn(&mut PlantingImage<'_>));

/// A volume that is being changed.
pub struct PlantingImage<'a> {
    pub base: &'a BaseVolume,
    pub image: Vec<u8>,
}

impl PlantingImage<'_> {
    fn find_part(&self, what: &str) -> VolumeStructure {
        self.base.parts.iter().find(|part| part.what == what).expect(what).clone()
    }

    /// Returns an inode whose bytes satisfy `is`.
    fn find_inode(&self, is: impl Fn(&[u8]) -> bool) -> VolumeStructure {
        let mut inodes = self.base.parts.iter().filter(|part| {
            part.what == "inode"
                && part.range.len() > 128
                && !matches!(part.seal, ChecksumOwner::Inode(..11))
        });
        inodes.find(|part| is(&self.image[part.range.clone()])).expect("an inode").clone()
    }

    fn flip_byte(&mut self, part: &VolumeStructure, at: usize, sealed: bool) {
        self.image[part.range.start + at] ^= 1;
        if sealed {
            self.base.set_checksum(&mut self.image, part);
        }
    }

    fn write_bytes(&mut self, part: &VolumeStructure, at: usize, bytes: &[u8]) {
        let at = part.range.start + at;
        self.image[at..at + bytes.len()].copy_from_slice(bytes);
        self.base.set_checksum(&mut self.image, part);
    }

    fn clear_flag(&mut self, part: &VolumeStructure, flag: u32) {
        let flags = inode_flags(&self.image[part.range.clone()]) & !flag;
        self.write_bytes(part, 32, &flags.to_le_bytes());
    }

    fn change_group(&mut self, change: impl FnOnce(&mut GroupDescriptor)) {
        self.base.change_group(&mut self.image, 0, |group, _| change(group));
    }
}

fn inode_flags(inode: &[u8]) -> u32 {
    u32::from_le_bytes(inode[32..36].try_into().unwrap())
}

fn inode_file_type(inode: &[u8]) -> u8 {
    inode[1] >> 4
}

/// Options of the volumes.
pub const ORPHAN_FILE_OPTIONS: &str = "-t ext4 -b 1024 -O orphan_file";
pub const MMP_OPTIONS: &str = "-t ext4 -b 1024 -O mmp";
pub const BIGALLOC_OPTIONS: &str = "-t ext4 -b 1024 -O bigalloc -C 4096";
pub const INLINE_DATA_OPTIONS: &str = "-t ext4 -b 1024 -O inline_data,ea_inode -I 256";
pub const ENCRYPT_OPTIONS: &str = "-t ext4 -b 1024 -O encrypt";
pub const QUOTA_OPTIONS: &str = "-t ext4 -b 4096 | -O project,quota -Q usrquota,grpquota,prjquota";

/// All planted problems.
pub const PLANTED_PROBLEMS: &[PlantedProblem] = &[
    (ORPHAN_FILE_OPTIONS, What::SuperblockChecksum, |it| it.image[1024 + 0x30] ^= 1),
    (ORPHAN_FILE_OPTIONS, What::GroupChecksum, |it| {
        let part = it.find_part("descriptor");
        it.flip_byte(&part, 0x1E, false);
    }),
    (ORPHAN_FILE_OPTIONS, What::GroupUnused, |it| {
        it.change_group(|group| group.unused_inodes = 60_000)
    }),
    (ORPHAN_FILE_OPTIONS, What::BlockBitmapChecksum, |it| {
        it.change_group(|group| group.bitmap_checksums[0] ^= 1)
    }),
    (ORPHAN_FILE_OPTIONS, What::InodeBitmapChecksum, |it| {
        it.change_group(|group| group.bitmap_checksums[1] ^= 1)
    }),
    (ORPHAN_FILE_OPTIONS, What::OrphanFile, |it| {
        let end = it.base.parts.iter().rfind(|part| part.what == "orphan file").unwrap().clone();
        let len = end.range.len();
        it.write_bytes(&end, len - 8, &[0; 4]);
    }),
    (ORPHAN_FILE_OPTIONS, What::JournalNotEmpty, |it| {
        let part = it.find_part("journal");
        it.write_bytes(&part, 0x1C, &[0, 0, 0, 1]);
    }),
    (ORPHAN_FILE_OPTIONS, What::InodeChecksum, |it| {
        let part = it.find_inode(|it| inode_file_type(it) == 8);
        it.flip_byte(&part, 8, false);
    }),
    (ORPHAN_FILE_OPTIONS, What::ExtentNode, |it| {
        let part = it.find_part("node");
        it.write_bytes(&part, 0, &[0, 0]);
    }),
    (ORPHAN_FILE_OPTIONS, What::ExtentChecksum, |it| {
        let part = it.find_part("node");
        it.flip_byte(&part, 8, false);
    }),
    (ORPHAN_FILE_OPTIONS, What::ExtentStart, |it| {
        let root = it.find_inode(|it| {
            inode_file_type(it) == 8 && inode_flags(it) & EXTENTS_FLAG != 0 && it[46] > 0
        });
        it.flip_byte(&root, 40 + 12, true);
    }),
    (ORPHAN_FILE_OPTIONS, What::ExtentFlag, |it| {
        let part =
            it.find_inode(|it| inode_file_type(it) == 8 && inode_flags(it) & EXTENTS_FLAG != 0);
        it.clear_flag(&part, EXTENTS_FLAG);
    }),
    (ORPHAN_FILE_OPTIONS, What::DirectoryUnwritten, |it| {
        let part = it.find_inode(|it| inode_file_type(it) == 4 && it[42] == 1 && it[46] == 0);
        let len = it.image[part.range.start + 40 + 12 + 4];
        it.write_bytes(&part, 40 + 12 + 4, &[len, 0x80]);
    }),
    (ORPHAN_FILE_OPTIONS, What::DirectoryChecksum, |it| {
        let part =
            it.base.parts.iter().find(|part| part.what == "directory" && part.range.len() == 1024);
        let part = part.unwrap().clone();
        it.flip_byte(&part, 1023, false);
    }),
    (ORPHAN_FILE_OPTIONS, What::AttributeChecksum, |it| {
        let part = it.find_part("attributes");
        it.flip_byte(&part, 16, false);
    }),
    (MMP_OPTIONS, What::MmpBlock, |it| {
        let part = it.find_part("mmp");
        it.write_bytes(&part, 0, &[0; 4]);
    }),
    (BIGALLOC_OPTIONS, What::Misaligned, |it| {
        let part = it
            .find_inode(|it| inode_file_type(it) == 8 && it[42] == 1 && it[46] == 0 && it[56] == 1);
        it.flip_byte(&part, 40 + 12 + 8, true);
    }),
    (INLINE_DATA_OPTIONS, What::InlineData, |it| {
        let part = it.find_inode(|it| inode_flags(it) & INLINE_DATA_FLAG != 0);
        it.write_bytes(&part, 128 + 32, &[0; 4]);
    }),
    (INLINE_DATA_OPTIONS, What::AttributeValue, |it| {
        let part = it.find_inode(|it| inode_flags(it) & EA_INODE_FLAG != 0);
        it.flip_byte(&part, 8, true);
    }),
    (INLINE_DATA_OPTIONS, What::Flags, |it| {
        let part = it.find_inode(|it| inode_flags(it) & EA_INODE_FLAG != 0);
        it.clear_flag(&part, EA_INODE_FLAG);
    }),
    (INLINE_DATA_OPTIONS, What::FeatureLost, |it| {
        let part = it.find_part("superblock");
        let features = it.image[part.range.start + 0x61];
        it.write_bytes(&part, 0x61, &[features & !0x80]);
    }),
    (INLINE_DATA_OPTIONS, What::AttributeValueReferences, |it| {
        let part = it.find_inode(|it| inode_flags(it) & EA_INODE_FLAG != 0);
        it.write_bytes(&part, 36, &[77]);
    }),
    (ENCRYPT_OPTIONS, What::Encryption, |it| {
        let part = it.find_inode(|it| inode_flags(it) & ENCRYPT_FLAG != 0);
        it.write_bytes(&part, 128 + 32, &[0; 4]);
    }),
    (ENCRYPT_OPTIONS, What::EntryEncryption, |it| {
        let part =
            it.find_inode(|it| inode_flags(it) & ENCRYPT_FLAG != 0 && inode_file_type(it) == 8);
        it.clear_flag(&part, ENCRYPT_FLAG);
    }),
    (QUOTA_OPTIONS, What::Quota, |it| {
        let is_leaf = |part: &&VolumeStructure| {
            part.what == "quota" && it.image[part.range.start] != 0x11 && part.range.len() == 4096
        };
        let leaf = it.base.parts.iter().find(is_leaf).unwrap().clone();
        it.flip_byte(&leaf, 1024 + 16 + 48, true);
    }),
];
