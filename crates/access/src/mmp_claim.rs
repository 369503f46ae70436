//! MMP claims of tools: exclusive use of a volume that other hosts can reach (`mmp`).

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use draconis_device::Disk;
use draconis_ext::{MmpClaim, MmpClaimOptions};
use draconis_types::Time;
use draconis_types::path_bytes::ShowPath;

use crate::image::open_volume_error;

/// The longest MMP update interval is 300 s; a claim waits for up to two, with reserve.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(900);

/// Claim of a tool on a volume: if the volume has `mmp`, it is marked as in use until this is
/// dropped.
#[must_use]
#[derive(Debug)]
pub struct MmpGuard {
    claim: Option<MmpClaim>,
    now: Time,
}

impl MmpGuard {
    /// Borrows the claim for code that does not release it.
    pub fn claim(&self) -> Option<MmpClaim> {
        self.claim.as_ref().map(MmpClaim::borrow)
    }
}

impl Drop for MmpGuard {
    fn drop(&mut self) {
        if let Some(claim) = &self.claim
            && let Err(error) = claim.release(self.now)
        {
            log::error!("other hosts still see the volume in use: {error}");
        }
    }
}

/// Calls `work` with the options for claiming a volume, which may wait.
fn with_claim_options<T>(
    image: &Path,
    now: Time,
    work: impl FnOnce(&MmpClaimOptions<'_>) -> T,
) -> T {
    let wait = |time: Duration| {
        let shown = image.shown();
        log::info!("{shown}: waits {} s for signs of other hosts (mmp)", time.as_secs());
        std::thread::sleep(time);
    };
    work(&MmpClaimOptions {
        now,
        random: RandomState::new().build_hasher().finish() as u32,
        node: "draconis",
        wait: &wait,
        max_wait: CLAIM_TIMEOUT,
    })
}

/// Claims a volume for writing, if it has `mmp`.
///
/// # Errors
/// Another host uses the volume, or the disk fails.
pub fn claim_volume(image: &Path, disk: &Arc<dyn Disk>, now: Time) -> anyhow::Result<MmpGuard> {
    let claim = with_claim_options(image, now, |how| MmpClaim::acquire_for_tool(disk, how));
    let claim = claim.map_err(|error| open_volume_error(image, &**disk, error.into()))?;
    Ok(MmpGuard { claim, now })
}

/// Replays the journal or completes an unfinished change, then claims the volume for writing.
///
/// # Errors
/// As [`claim_volume`]; replay fails.
pub fn recover_and_claim(
    image: &Path,
    disk: &Arc<dyn Disk>,
    now: Time,
) -> anyhow::Result<MmpGuard> {
    let settled = with_claim_options(image, now, |how| draconis_ext::recover_unmounted(disk, how));
    let (was_pending, claim) =
        settled.map_err(|error| open_volume_error(image, &**disk, error.into()))?;
    let held = MmpGuard { claim, now };
    if was_pending {
        let shown = image.shown();
        log::info!("{shown}: what its journal held, or an unfinished change, is in place now");
    }
    Ok(held)
}

/// Marks the MMP block as clean, whatever state an interrupted tool left.
///
/// # Errors
/// The disk fails.
pub fn clear_mmp(image: &Path, disk: &Arc<dyn Disk>, now: Time) -> anyhow::Result<()> {
    with_claim_options(image, now, |how| draconis_ext::clear_mmp(disk, how))
        .map_err(|error| open_volume_error(image, &**disk, error.into()))
}
