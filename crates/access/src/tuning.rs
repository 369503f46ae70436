//! Changing superblock settings: label, UUID, reserved blocks, features, journal.

use std::path::Path;
use std::sync::Arc;

use draconis_device::Disk;
use draconis_ext::tune::{self, OfflineError, Reserved, TuneChanges};
use draconis_types::Time;
use draconis_types::path_bytes::ShowPath;
use rustix::io::Errno;

use crate::error::{Error as Failure, Result};
use crate::uuid::{self, UuidGenerator};
use crate::{image, mmp_claim};

/// Changes as callers spell them; `None` leaves a setting unchanged.
#[derive(Clone, Copy, Default, Debug)]
pub struct TuneOptions<'a> {
    /// A UUID, `random` or `clear`.
    pub uuid: Option<&'a str>,
    /// Reserved blocks: a number, or a percentage (`5%`).
    pub reserved: Option<&'a str>,
    /// Features to set, or with `^` to clear, separated by commas.
    pub features: Option<&'a str>,
    /// Maximum mount count before a check, up to 32,767; -1 for no limit.
    pub max_mounts: Option<i32>,
}

impl TuneOptions<'_> {
    /// Parses the texts into changes.
    ///
    /// # Errors
    /// A text is invalid.
    pub fn parse(&self) -> Result<TuneChanges> {
        let wrong = |text: String| Failure::new(Errno::INVAL, text);
        let mut identities = UuidGenerator::new(None);
        let uuid = match self.uuid {
            None => None,
            Some("random") => Some(identities.uuid()),
            Some("clear") => Some([0; 16]),
            Some(text) => Some(
                uuid::parse(text)
                    .ok_or_else(|| wrong(format!("{text}: a UUID, random or clear is needed")))?,
            ),
        };
        let reserved = |text: &str| {
            let reserved = match text.strip_suffix('%') {
                Some(percent) => percent
                    .parse()
                    .ok()
                    .filter(|percent| (0.0..=50.0).contains(percent))
                    .map(|percent: f64| Reserved::Ppm((percent * 10_000.0).round() as u32)),
                None => text.parse().ok().map(Reserved::Blocks),
            };
            reserved.ok_or_else(|| wrong(format!("{text}: blocks, or 0% to 50% are possible")))
        };
        let max_mounts = match self.max_mounts {
            None => None,
            Some(-1) => Some(0),
            Some(mounts) => Some(
                u16::try_from(mounts)
                    .ok()
                    .filter(|mounts| (1..=0x7FFF).contains(mounts))
                    .ok_or_else(|| {
                        wrong(format!("{mounts} mounts: 1 to 32767, or -1 for never"))
                    })?,
            ),
        };
        let features = self.features.unwrap_or_default().split(',').map(str::trim);
        let features = features.filter(|word| !word.is_empty());
        Ok(TuneChanges {
            uuid,
            max_mounts,
            reserved: self.reserved.map(reserved).transpose()?,
            features: features.map(str::to_owned).collect(),
            hash_seed: identities.uuid(),
            ..TuneChanges::default()
        })
    }
}

/// Changes the volume that fills `disk`, which is claimed. Replays the journal or completes an
/// unfinished change first, even if there are no changes.
///
/// # Errors
/// The volume does not support the change, or the disk fails.
pub fn tune(
    image: &Path,
    disk: &Arc<dyn Disk>,
    changes: &TuneChanges,
    now: Time,
) -> anyhow::Result<()> {
    let _held = mmp_claim::recover_and_claim(image, disk, now)?;
    tune::tune(disk, changes, now).map_err(|error| match error {
        OfflineError::Volume(error) => image::open_volume_error(image, &**disk, error.into()),
        error => anyhow::Error::from(error).context(image.shown().to_string()),
    })
}
