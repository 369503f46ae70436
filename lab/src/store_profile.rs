//! Profile of a device for the object store, and its file.
//!
//! ```text
//!   subject ── bare disk, a region of it ── probe of the object store ── its rule
//!                                                                          │
//!   draconis store create --profile FILE ◀── profile-SUBJECT.json ◀────────┘
//! ```
//!
//! Law 1: measuring and choosing are done by the store's own probe and rule; they are not
//! duplicated here.

use draconis_objects::probe;
use serde::{Deserialize, Serialize};

use crate::subject::RawRegion;
use crate::units;

/// Assumed length of the device if it is unknown, in bytes: a store can have any length, so the
/// profile is for a large one.
const STORE_BYTES: u64 = 64 << 30;

/// Parameters of the store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProfileParameters {
    /// Layout: `log` or `cow`.
    pub layout: String,
    /// Write unit, in bytes.
    pub page_bytes: u32,
    /// Segment size, the unit of cleaning, in bytes.
    pub segment_bytes: u32,
    /// Number of requests in flight.
    pub queue_depth: u32,
}

/// File that `draconis store create --profile` reads.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StoreProfile {
    /// Subject that was measured.
    pub subject: String,
    /// Parameters derived from the measurements.
    pub profile: ProfileParameters,
    /// Reasons, one line for each parameter.
    pub why: Vec<String>,
}

impl StoreProfile {
    /// Measures the region of a bare disk, which is overwritten.
    ///
    /// # Errors
    /// The disk fails, or the region is too short.
    pub fn measure(subject: String, bare: &RawRegion) -> anyhow::Result<Self> {
        let clock = || bare.clock.now_ns();
        let ignore = &mut |_, _| {};
        let measured = probe::probe(&*bare.disk, &clock, bare.region, bare.told_bytes, ignore)?;
        let (profile, why) = measured.profile(bare.len_bytes.unwrap_or(STORE_BYTES));
        let profile = ProfileParameters {
            layout: profile.layout.to_string(),
            page_bytes: profile.page_bytes,
            segment_bytes: profile.segment_bytes,
            queue_depth: profile.queue_depth,
        };
        Ok(Self { subject, profile, why })
    }

    /// Returns the file name: `profile-model-ssd.json`.
    pub fn file_name(&self) -> String {
        let word = |part: &&str| !part.is_empty();
        let words: Vec<&str> =
            self.subject.split(|c: char| !c.is_alphanumeric()).filter(word).collect();
        format!("profile-{}.json", words.join("-"))
    }

    /// Formats the profile: `layout cow, pages of 4 KiB, segments of 16 MiB, queue depth 32`.
    pub fn describe(&self) -> String {
        let ProfileParameters { layout, page_bytes, segment_bytes, queue_depth } = &self.profile;
        format!(
            "layout {layout}, pages of {}, segments of {}, queue depth {queue_depth}",
            units::format_bytes(f64::from(*page_bytes)),
            units::format_bytes(f64::from(*segment_bytes)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_have_distinct_profile_files() {
        let profile = ProfileParameters {
            layout: "cow".into(),
            page_bytes: 4096,
            segment_bytes: 1 << 24,
            queue_depth: 8,
        };
        let of = |subject: &str| StoreProfile {
            subject: subject.into(),
            profile: profile.clone(),
            why: vec![],
        };
        for (subject, name) in [
            ("file", "profile-file.json"),
            ("dev:/dev/vdb", "profile-dev-dev-vdb.json"),
            ("model:ssd,page=8K", "profile-model-ssd-page-8K.json"),
        ] {
            assert_eq!(of(subject).file_name(), name);
        }
        assert_eq!(
            of("file").describe(),
            "layout cow, pages of 4 KiB, segments of 16 MiB, queue depth 8"
        );
    }
}
