//! Journalled volumes, made by `mke2fs`: ext3 and ext4, with every kind of checksum, and with
//! journals so short that they wrap several times in each run.
//!
//! ```text
//!   mke2fs over old bytes ──▶ its journal, at least 1024 blocks ──▶ a shorter log, other sums
//! ```
//! Law: the log is the start of the journal inode; the rest of the inode is unused. To `e2fsck`
//! and to us this is an ordinary journal. Linux requires 1024 blocks, so some have them.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, bail};
use draconis_device::MemoryDisk;
use draconis_ext::format::jbd2::{JournalCompatible, JournalIncompatible, RawJournalSuperblock};
use draconis_ext::{BlockLocation, InodeNumber, Volume};

use super::small_cache_options;

/// The inode of the journal.
const JOURNAL_INODE: InodeNumber = InodeNumber(8);
/// Minimum journal size of mke2fs, in blocks.
const MIN_JOURNAL_BLOCKS: u32 = 1024;

/// Parameters of a test volume.
#[derive(Clone, Copy, Debug)]
pub(super) struct JournalledVolume {
    /// `ext3` or `ext4`.
    pub(super) kind: &'static str,
    block_bytes: u32,
    /// Blocks of the journal, superblock included.
    log_blocks: u32,
    sums: JournalChecksums,
}

/// Checksums of a journal.
#[derive(Clone, Copy, Debug)]
enum JournalChecksums {
    None,
    Commit,
    V2,
    V3,
    /// V3 and 64-bit block numbers.
    V3Wide,
}

const fn journalled_volume(
    kind: &'static str,
    block_bytes: u32,
    log_blocks: u32,
    sums: JournalChecksums,
) -> JournalledVolume {
    JournalledVolume { kind, block_bytes, log_blocks, sums }
}

/// All variants; neighbours differ in as much as possible.
pub(super) const JOURNALLED_VOLUMES: [JournalledVolume; 10] = [
    journalled_volume("ext3", 1024, 160, JournalChecksums::None),
    journalled_volume("ext4", 1024, 128, JournalChecksums::V3Wide),
    journalled_volume("ext3", 4096, 112, JournalChecksums::V3),
    journalled_volume("ext4", 4096, 96, JournalChecksums::V3),
    journalled_volume("ext3", 1024, 320, JournalChecksums::V2),
    journalled_volume("ext4", 1024, 1024, JournalChecksums::V3),
    journalled_volume("ext3", 4096, 96, JournalChecksums::Commit),
    journalled_volume("ext4", 4096, 200, JournalChecksums::None),
    journalled_volume("ext3", 1024, 1024, JournalChecksums::V3Wide),
    journalled_volume("ext4", 1024, 200, JournalChecksums::V2),
];

impl std::fmt::Display for JournalledVolume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kind, block_bytes, log_blocks, sums } = self;
        write!(f, "{kind} -b {block_bytes}, log of {log_blocks}, sums {sums:?}")
    }
}

impl JournalledVolume {
    /// Creates a volume whose free blocks hold old data.
    pub(super) fn make_image(&self) -> anyhow::Result<Vec<u8>> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("volume");
        let journal_mib = (self.block_bytes * MIN_JOURNAL_BLOCKS) >> 20;
        let len =
            usize::try_from(self.block_bytes)? * if self.block_bytes > 1024 { 3400 } else { 5000 };
        std::fs::write(&path, vec![0xEE; len])?;
        self.mke2fs(&path, journal_mib)?;
        let mut bytes = std::fs::read(&path)?;
        let log = JournalLocation::of_image(&bytes)?;
        let at = log.blocks.first().context("a journal without blocks")? * log.block_bytes;
        let raw = bytes.get_mut(usize::try_from(at)?..).unwrap_or_default();
        let raw = RawJournalSuperblock::view_mut(raw)?;
        let (compatible, incompatible) = self.sums.journal_features();
        raw.s_feature_compat.set(compatible.bits());
        raw.s_feature_incompat.set(incompatible.bits());
        // 4 is crc32c.
        raw.s_checksum_type = if incompatible.is_empty() { 0 } else { 4 };
        raw.s_maxlen.set(self.log_blocks);
        raw.set_tail(None, 1);
        Ok(bytes)
    }

    fn mke2fs(&self, path: &Path, journal_mib: u32) -> anyhow::Result<()> {
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", self.kind, "-I", "256", "-m", "0", "-N", "512"])
            .args(["-b", &self.block_bytes.to_string(), "-J", &format!("size={journal_mib}")])
            .args(["-U", "07070707-0707-0707-0707-070707070707"])
            .args([
                "-E",
                "nodiscard,lazy_itable_init=0,hash_seed=07070707-0707-0707-0707-070707070707",
            ])
            .arg(path)
            .env("E2FSPROGS_FAKE_TIME", "1600000000")
            .output()
            .context("mke2fs, of e2fsprogs, makes the volumes of --journal")?;
        if !made.status.success() {
            bail!("mke2fs: {}", String::from_utf8_lossy(&made.stderr));
        }
        Ok(())
    }
}

impl JournalChecksums {
    fn journal_features(self) -> (JournalCompatible, JournalIncompatible) {
        let none = (JournalCompatible::empty(), JournalIncompatible::empty());
        match self {
            Self::None => none,
            Self::Commit => (JournalCompatible::CHECKSUM, none.1),
            Self::V2 => (none.0, JournalIncompatible::CSUM_V2),
            Self::V3 => (none.0, JournalIncompatible::CSUM_V3),
            Self::V3Wide => {
                (none.0, JournalIncompatible::CSUM_V3.union(JournalIncompatible::SIXTY_FOUR_BIT))
            }
        }
    }
}

/// Location of a volume's journal.
pub(super) struct JournalLocation {
    /// Block of the volume for each journal block.
    pub(super) blocks: Vec<u64>,
    pub(super) block_bytes: u64,
}

impl JournalLocation {
    pub(super) fn of_image(image: &[u8]) -> anyhow::Result<Self> {
        let volume =
            Volume::open(Arc::new(MemoryDisk::new(image.to_vec(), 512)), small_cache_options())?;
        let block_bytes = u64::from(volume.superblock().block_bytes);
        let len = volume.attributes(JOURNAL_INODE)?.size_bytes;
        let mut blocks = vec![];
        while (blocks.len() as u64) < len / block_bytes {
            let before = blocks.len();
            for run in volume.map(JOURNAL_INODE, before as u64 * block_bytes)? {
                if let BlockLocation::Mapped(first) = run.location {
                    blocks.extend((0..u64::from(run.blocks)).map(|nth| first.0 + nth));
                }
            }
            if blocks.len() == before {
                bail!("a journal with a hole");
            }
        }
        Ok(Self { blocks, block_bytes })
    }
}
