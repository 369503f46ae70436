//! Volumes of which a part stays free.

use super::plan::fitting;
use super::{Error, Options, Plan, Result, Tree};

/// Free space of a volume whose size follows from its files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FreeSpace {
    /// A tenth of the volume, and at least 16 MiB.
    #[default]
    Usual,
    /// So many bytes; 0 makes the smallest volume.
    Bytes(u64),
    /// Millionths of the volume, up to 950,000.
    Part(u32),
}

impl FreeSpace {
    /// Lays out the smallest volume that holds the tree and leaves this to users.
    ///
    /// # Errors
    /// As [`fitting`].
    pub fn fit<'a>(self, options: &Options, tree: &'a mut Tree) -> Result<Plan<'a>> {
        match self {
            Self::Usual => fitting_with_part(options, tree, USUAL_PPM, USUAL_MIN_BYTES),
            Self::Bytes(free) => fitting(options, tree, free),
            Self::Part(part) => fitting_with_part(options, tree, part, 0),
        }
    }
}

/// Lays out the smallest volume that holds the tree and leaves `part_ppm` millionths of itself to
/// users.
fn fitting_with_part<'a>(
    options: &Options,
    tree: &'a mut Tree,
    part_ppm: u32,
    at_least_bytes: u64,
) -> Result<Plan<'a>> {
    const ALL: u128 = 1_000_000;
    let part = u128::from(part_ppm.min(MOST_FREE_PPM));
    let mut free_bytes = at_least_bytes;
    let mut most = None;
    for turn in 0..MOST_TURNS {
        let len = match fitting(options, tree, free_bytes) {
            Ok(plan) => u128::from(plan.layout.len_bytes()),
            Err(Error::TooLarge { .. }) if turn > 0 => break,
            Err(error) => return Err(error),
        };
        let free = u128::from(free_bytes);
        let missing = (len * part / ALL).saturating_sub(free);
        if missing == 0 {
            return fitting(options, tree, free_bytes);
        }
        let most = *most.get_or_insert(len.saturating_mul(MOST_TIMES));
        if len > most {
            break;
        }
        // What is free makes the volume larger, of which it is a part again; tables and what is
        // reserved grow with it, for which there is another turn.
        let more = (missing * ALL).div_ceil(ALL - part).max(len / STEP);
        free_bytes = u64::try_from(free + more).unwrap_or(u64::MAX);
    }
    Err(Error::Misuse(
        "so much of a volume does not stay free: tables and what is reserved (-m) take the rest"
            .into(),
    ))
}

/// [`FreeSpace::Usual`].
const USUAL_PPM: u32 = 100_000;
/// The least of that, in bytes.
const USUAL_MIN_BYTES: u64 = 16 << 20;
/// The most of a volume that can be asked to be free.
const MOST_FREE_PPM: u32 = 950_000;
/// A volume is counted anew so often; with 90 % each turn leaves two thirds of what is missing.
const MOST_TURNS: usize = 60;
/// A volume becomes larger by at least this part of itself, so that this ends.
const STEP: u128 = 4096;
/// What grows beyond so many times the volume without that space would grow on.
const MOST_TIMES: u128 = 1024;
