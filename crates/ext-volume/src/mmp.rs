//! Multi-mount protection (`mmp`): a claim on a volume that several hosts can reach.
//!
//! ```text
//!   clean ───────────────────────────────▶ own number ─ wait ─▶ unchanged: ours
//!   a number ─ wait ─▶ the same: stale ─────────┘          └──▶ another: in use
//!                 └──▶ another: in use
//!   ours ─▶ another own number every interval ─▶ .. ─▶ clean      a mount
//!        └▶ SEQ_FSCK, which no host claims ──────────▶ .. ─▶ clean      a tool, no renewals
//! ```
//! Law 1: nothing else of the volume is written before the claim is established.
//! Law 2: a host that reads a foreign sequence number, or cannot write its own, stops writing.
//! Law 3: the caller waits: this module computes the time and has no clock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use draconis_device::{Disk, Extent, Group};
use draconis_types::Time;
use draconis_types::lock::Mutex;

use crate::blocks::uncached::{read_bytes, read_superblock, write_of};
use crate::format::checksum::Checksum;
use crate::format::mmp::{
    self, LEN_BYTES, MIN_CHECK_INTERVAL, MmpRecord, SEQ_CLEAN, SEQ_FSCK, SEQ_MAX,
};
use crate::format::superblock::Superblock;
use crate::format::superblock::to_disk_seconds;
use crate::units::saturating_usize;
use crate::{Error, Result};

/// Limit of the wait for another host's next number, in addition to the interval.
const MAX_EXTRA_WAIT_SECONDS: u64 = 60;

/// Parameters for acquiring a claim.
pub struct MmpClaimOptions<'a> {
    /// Current time.
    pub now: Time,
    /// Random number that distinguishes this host.
    pub random: u32,
    /// Name of this host, shown to hosts that are refused.
    pub node: &'a str,
    /// Sleeps for a duration.
    pub wait: &'a dyn Fn(Duration),
    /// Limit of the total wait; a claim that may need more fails.
    pub max_wait: Duration,
}

/// A claim on a volume.
pub struct MmpClaim {
    disk: Arc<dyn Disk>,
    at_bytes: u64,
    seed: Option<Checksum>,
    interval: Duration,
    own_record: Mutex<MmpRecord>,
    /// True if another claim releases the volume.
    is_borrowed: bool,
}

impl MmpClaim {
    /// Claims the volume on `disk`; returns `None` if it has no `mmp` feature.
    ///
    /// # Errors
    /// [`Error::InUse`] if another host uses it; [`Error::Unsupported`] if the check would take too
    /// long; damage, and errors of the device.
    pub fn acquire(disk: &Arc<dyn Disk>, how: &MmpClaimOptions<'_>) -> Result<Option<Self>> {
        let super_ = read_superblock(&**disk)?;
        let Some(claim) = Self::acquire_with_superblock(disk, &super_, how)? else {
            return Ok(None);
        };
        let there = claim.read()?;
        if there.sequence == SEQ_FSCK {
            let by = "a check or another tool; `draconis tune -E clear_mmp` if that was cut off";
            return Err(in_use_error(&there, by));
        }
        let interval =
            u64::from(super_.mmp_interval.max(MIN_CHECK_INTERVAL).max(there.interval_seconds));
        let wait = Duration::from_secs(
            (2 * interval).saturating_add(1).min(interval + MAX_EXTRA_WAIT_SECONDS),
        );
        let is_clean = there.sequence == SEQ_CLEAN;
        let all = if is_clean { wait } else { wait.saturating_mul(2) };
        if all > how.max_wait {
            let feature = format!(
                "writing needs: mmp; finding out whether another host uses the volume takes {} s, \
                 which is longer than is waited for: tune2fs -E mmp_update_interval=5",
                all.as_secs()
            );
            return Err(Error::Unsupported { feature });
        }
        if !is_clean {
            (how.wait)(wait);
            let again = claim.read()?;
            if again.sequence != there.sequence {
                return Err(in_use_error(&again, "another host"));
            }
        }
        let mine = claim.own_record.lock().clone();
        claim.write(&mine, how.now)?;
        (how.wait)(wait);
        let again = claim.read()?;
        if again.sequence != mine.sequence {
            return Err(in_use_error(&again, "another host"));
        }
        Ok(Some(claim))
    }

    /// Claims the volume for a tool, as e2fsck and tune2fs do. The claim needs no renewal; it
    /// blocks other hosts until it is released, even if the tool crashes.
    ///
    /// # Errors
    /// As [`MmpClaim::acquire`].
    pub fn acquire_for_tool(
        disk: &Arc<dyn Disk>,
        how: &MmpClaimOptions<'_>,
    ) -> Result<Option<Self>> {
        let Some(claim) = Self::acquire(disk, how)? else { return Ok(None) };
        let mut mine = claim.own_record.lock();
        mine.sequence = SEQ_FSCK;
        claim.write(&mine, how.now)?;
        drop(mine);
        Ok(Some(claim))
    }

    /// Borrows the claim; the borrower does not release it.
    #[must_use]
    pub fn borrow(&self) -> Self {
        Self {
            disk: self.disk.clone(),
            own_record: Mutex::new(self.own_record.lock().clone()),
            is_borrowed: true,
            ..*self
        }
    }

    /// Resumes the claim of this host's crashed process.
    ///
    /// # Errors
    /// Damage, and errors of the device.
    pub fn resume(disk: &Arc<dyn Disk>, how: &MmpClaimOptions<'_>) -> Result<Option<Self>> {
        let super_ = read_superblock(&**disk)?;
        let Some(claim) = Self::acquire_with_superblock(disk, &super_, how)? else {
            return Ok(None);
        };
        let mine = claim.own_record.lock().clone();
        claim.write(&mine, how.now)?;
        Ok(Some(claim))
    }

    fn acquire_with_superblock(
        disk: &Arc<dyn Disk>,
        super_: &Superblock,
        how: &MmpClaimOptions<'_>,
    ) -> Result<Option<Self>> {
        if !super_.has_mmp() {
            return Ok(None);
        }
        let wrong = Error::corrupt("the block that guards against mounting twice: place");
        let block = super_.mmp_block.filter(|block| super_.is_valid_block(*block)).ok_or(wrong)?;
        let interval = super_.mmp_interval.max(1);
        let mine = MmpRecord {
            sequence: (how.random % SEQ_MAX).saturating_add(1),
            interval_seconds: interval.saturating_mul(2).max(MIN_CHECK_INTERVAL),
            node: how.node.to_owned(),
            device: "draconis".to_owned(),
        };
        Ok(Some(Self {
            disk: disk.clone(),
            at_bytes: block.0.saturating_mul(super_.block_bytes.into()),
            seed: super_.checksum_seed,
            interval: Duration::from_secs(interval.into()),
            own_record: Mutex::new(mine),
            is_borrowed: false,
        }))
    }

    /// Returns the interval between calls of [`MmpClaim::renew`].
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// Renews the claim with the next sequence number.
    ///
    /// # Errors
    /// [`Error::InUse`] if another host has claimed it; errors of the device.
    pub fn renew(&self, now: Time) -> Result<()> {
        let mut mine = self.own_record.lock();
        if mine.sequence == SEQ_CLEAN {
            // Released meanwhile.
            return Ok(());
        }
        let there = self.read()?;
        if there.sequence != mine.sequence {
            return Err(in_use_error(&there, "another host, which took it meanwhile"));
        }
        if mine.sequence == SEQ_FSCK {
            return Ok(());
        }
        let mut next = mine.clone();
        next.sequence = (mine.sequence % SEQ_MAX).saturating_add(1);
        self.write(&next, now)?;
        *mine = next;
        Ok(())
    }

    /// Releases the claim.
    ///
    /// # Errors
    /// As [`MmpClaim::renew`].
    pub fn release(&self, now: Time) -> Result<()> {
        // The claimed volume may have lost the `mmp` feature meanwhile.
        if self.is_borrowed || !read_superblock(&*self.disk)?.has_mmp() {
            return Ok(());
        }
        let mut mine = self.own_record.lock();
        let there = self.read()?;
        if there.sequence != mine.sequence {
            return Err(in_use_error(&there, "another host, which took it meanwhile"));
        }
        mine.sequence = SEQ_CLEAN;
        self.write(&mine, now)
    }

    /// Returns the extent of the MMP block's record, in whole sectors.
    #[allow(clippy::arithmetic_side_effects, reason = "the divisor is at least 1")]
    fn extent(&self) -> Extent {
        let sector = u64::from(self.disk.properties().sector_bytes.max(1));
        let start = (self.at_bytes / sector).saturating_mul(sector);
        let end = self.at_bytes.saturating_add(LEN_BYTES as u64).next_multiple_of(sector);
        Extent::new(start, end.saturating_sub(start))
    }

    fn read(&self) -> Result<MmpRecord> {
        let bytes = read_bytes(&*self.disk, Extent::new(self.at_bytes, LEN_BYTES as u64))?;
        mmp::read(&bytes, self.seed)
    }

    fn write(&self, record: &MmpRecord, now: Time) -> Result<()> {
        let at = self.extent();
        let mut bytes = read_bytes(&*self.disk, at)?;
        let skip = saturating_usize(self.at_bytes.saturating_sub(at.start_bytes));
        let seconds = u64::from(to_disk_seconds(now));
        mmp::write(bytes.get_mut(skip..).unwrap_or_default(), record, seconds, self.seed);
        let group = Group { writes: vec![write_of(at.start_bytes, &bytes)] };
        let ticket = self.disk.submit(group, &[]).map_err(|refused| Error::Io(refused.error))?;
        Ok(self.disk.wait_durable(ticket)?)
    }
}

/// Returns true if a tool has claimed the volume on `disk`.
pub fn is_claimed_by_tool(disk: &dyn Disk, super_: &Superblock) -> Result<bool> {
    let wrong = Error::corrupt("the block that guards against mounting twice: place");
    let block = super_.mmp_block.filter(|block| super_.is_valid_block(*block)).ok_or(wrong)?;
    let block_bytes = u64::from(super_.block_bytes);
    let bytes = read_bytes(disk, Extent::new(block.0.saturating_mul(block_bytes), block_bytes))?;
    Ok(mmp::read(&bytes, super_.checksum_seed)?.sequence == SEQ_FSCK)
}

/// Clears the claim on `disk` unconditionally, after a tool was killed.
///
/// # Errors
/// [`Error::Misuse`] if the volume has no `mmp` feature; damage, and errors of the device.
pub fn clear_mmp(disk: &Arc<dyn Disk>, how: &MmpClaimOptions<'_>) -> Result<()> {
    let super_ = read_superblock(&**disk)?;
    let claim = MmpClaim::acquire_with_superblock(disk, &super_, how)?;
    let claim = claim.ok_or(Error::Misuse("the volume does not guard against two hosts (mmp)"))?;
    let mut mine = claim.own_record.lock();
    mine.sequence = SEQ_CLEAN;
    claim.write(&mine, how.now)
}

impl fmt::Debug for MmpClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claim").field("mine", &self.own_record.lock()).finish_non_exhaustive()
    }
}

fn in_use_error(record: &MmpRecord, by: &str) -> Error {
    let MmpRecord { node, device, .. } = record;
    Error::InUse { by: format!("{by} (it calls itself {node:?}, and the device {device:?})") }
}
