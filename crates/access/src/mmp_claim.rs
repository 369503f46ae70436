//! A volume that a tool has to itself, also where other hosts can reach it (`mmp`).

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use draconis_device::Disk;
use draconis_exchange::contract::Time;
use draconis_ext::{MmpClaim, MmpClaimOptions};

use crate::image::refused;

/// A host signs every five minutes at the least often, and is waited for twice.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(900);

/// A volume that a tool has to itself: where other hosts can reach it (`mmp`), it is said to be in
/// use until this is dropped.
#[must_use]
#[derive(Debug)]
pub struct MmpGuard {
    claim: Option<MmpClaim>,
    now: Time,
}

impl MmpGuard {
    /// For what gives nothing back.
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

/// Does `work` with what claiming a volume needs, which may have to wait.
fn with_claiming<T>(image: &Path, now: Time, work: impl FnOnce(&MmpClaimOptions<'_>) -> T) -> T {
    let wait = |time: Duration| {
        let shown = image.display();
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

/// Claims a volume that is to be changed, where other hosts can reach it.
///
/// # Errors
/// Another host uses it, or what the disk says.
pub fn claim_volume(image: &Path, disk: &Arc<dyn Disk>, now: Time) -> anyhow::Result<MmpGuard> {
    let claim = with_claiming(image, now, |how| MmpClaim::acquire_for_tool(disk, how));
    let claim = claim.map_err(|error| refused(image, &**disk, error.into()))?;
    Ok(MmpGuard { claim, now })
}

/// Puts in place what a volume that is to be changed as a whole has waiting, and claims it.
///
/// # Errors
/// As [`claim_volume`]; what waits cannot be put in place.
pub fn recover_and_claim(
    image: &Path,
    disk: &Arc<dyn Disk>,
    now: Time,
) -> anyhow::Result<MmpGuard> {
    let settled = with_claiming(image, now, |how| draconis_ext::recover_unmounted(disk, how));
    let (was_pending, claim) = settled.map_err(|error| refused(image, &**disk, error.into()))?;
    let held = MmpGuard { claim, now };
    if was_pending {
        let shown = image.display();
        log::info!("{shown}: what its journal held, or an unfinished change, is in place now");
    }
    Ok(held)
}

/// Says that no host uses a volume, whatever a tool that was cut off left there.
///
/// # Errors
/// What the disk says.
pub fn clear_mmp(image: &Path, disk: &Arc<dyn Disk>, now: Time) -> anyhow::Result<()> {
    with_claiming(image, now, |how| draconis_ext::clear_mmp(disk, how))
        .map_err(|error| refused(image, &**disk, error.into()))
}
