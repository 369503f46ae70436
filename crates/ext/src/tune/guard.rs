//! The block by which hosts see that the volume is in use (`mmp`): added, dropped, and how often
//! they sign.

use super::{Changes, Error, Result};
use crate::commit::seconds_of;
use crate::format::features::Incompatible;
use crate::format::mmp::{self, MmpRecord};
use crate::format::superblock::RawSuperblock;
use crate::rework::Rework;
use crate::units::index;
use crate::{FsBlock, mkfs};

/// Sets how often a host says that it uses the volume.
pub(super) fn interval(raw: &mut RawSuperblock, changes: &Changes) -> Result<()> {
    let [_, incompatible, _] = raw.features();
    let has_guard = incompatible & Incompatible::MMP.bits() != 0;
    match changes.mmp_interval {
        Some(_) if !has_guard => {
            return Err(Error::Misuse("-E mmp_update_interval: needs mmp".to_owned()));
        }
        Some(seconds) if seconds > mkfs::MOST_MMP_INTERVAL => {
            let most = mkfs::MOST_MMP_INTERVAL;
            let what = format!("-E mmp_update_interval: at most {most} seconds");
            return Err(Error::Misuse(what));
        }
        Some(seconds) if seconds > 0 => raw.s_mmp_interval = seconds.into(),
        _ if has_guard && raw.s_mmp_interval.get() == 0 => {
            raw.s_mmp_interval = mkfs::MMP_INTERVAL.into();
        }
        _ => {}
    }
    Ok(())
}

/// Takes a block for it, and has that say that no host uses the volume.
pub(super) fn add(rework: &mut Rework<'_>) -> Result<()> {
    let block = rework.take_one()?;
    let super_ = &rework.to_be.super_;
    let mut bytes = vec![0; index(super_.block_bytes.into())];
    let said = MmpRecord {
        sequence: mmp::CLEAN,
        interval_seconds: rework.to_be.raw.s_mmp_interval.get().max(mmp::LEAST_INTERVAL),
        node: String::new(),
        device: String::new(),
    };
    mmp::write(&mut bytes, &said, seconds_of(rework.now).into(), super_.checksum_seed);
    rework.redo.write_free(FsBlock(block), &bytes)?;
    rework.to_be.raw.s_mmp_block = block.into();
    Ok(())
}

/// Frees it.
pub(super) fn drop_it(rework: &mut Rework<'_>) -> Result<()> {
    if let Some(FsBlock(block)) = rework.old.super_.mmp_block {
        rework.space.release(block..block.saturating_add(1));
    }
    rework.to_be.raw.s_mmp_block = 0.into();
    rework.to_be.raw.s_mmp_interval = 0.into();
    Ok(())
}
