//! Adding and removing the MMP block (`mmp`), and setting its update interval.

use super::{OfflineError, Result, TuneChanges};
use crate::format::features::Incompatible;
use crate::format::mmp::{self, MmpRecord};
use crate::format::superblock::RawSuperblock;
use crate::format::superblock::to_disk_seconds;
use crate::rewrite::VolumeRewrite;
use crate::units::saturating_usize;
use crate::{FsBlock, mkfs};

/// Sets the MMP update interval.
pub(super) fn set_interval(raw: &mut RawSuperblock, changes: &TuneChanges) -> Result<()> {
    let [_, incompatible, _] = raw.features();
    let has_guard = incompatible & Incompatible::MMP.bits() != 0;
    match changes.mmp_interval {
        Some(_) if !has_guard => {
            return Err(OfflineError::Misuse("-E mmp_update_interval: needs mmp".to_owned()));
        }
        Some(seconds) if seconds > mkfs::MAX_MMP_INTERVAL => {
            let most = mkfs::MAX_MMP_INTERVAL;
            let what = format!("-E mmp_update_interval: at most {most} seconds");
            return Err(OfflineError::Misuse(what));
        }
        Some(seconds) if seconds > 0 => raw.s_mmp_interval = seconds.into(),
        _ if has_guard && raw.s_mmp_interval.get() == 0 => {
            raw.s_mmp_interval = mkfs::DEFAULT_MMP_INTERVAL.into();
        }
        _ => {}
    }
    Ok(())
}

/// Allocates the MMP block and marks it as unused.
pub(super) fn add_mmp_block(rework: &mut VolumeRewrite<'_>) -> Result<()> {
    let block = rework.allocate_block()?;
    let super_ = &rework.planned.super_;
    let mut bytes = vec![0; saturating_usize(super_.block_bytes.into())];
    let said = MmpRecord {
        sequence: mmp::SEQ_CLEAN,
        interval_seconds: rework.planned.raw.s_mmp_interval.get().max(mmp::MIN_CHECK_INTERVAL),
        node: String::new(),
        device: String::new(),
    };
    mmp::write(&mut bytes, &said, to_disk_seconds(rework.now).into(), super_.checksum_seed);
    rework.redo.write_free_blocks(FsBlock(block), &bytes)?;
    rework.planned.raw.s_mmp_block = block.into();
    Ok(())
}

/// Frees the MMP block.
pub(super) fn remove_mmp_block(rework: &mut VolumeRewrite<'_>) -> Result<()> {
    if let Some(FsBlock(block)) = rework.old.super_.mmp_block {
        rework.space.release(block..block.saturating_add(1));
    }
    rework.planned.raw.s_mmp_block = 0.into();
    rework.planned.raw.s_mmp_interval = 0.into();
    Ok(())
}
