//! Volumes with a minimum share of free space.

use super::plan::plan_smallest;
use super::{FormatError, FormatOptions, Result, Tree, VolumePlan};

/// Free space of a volume whose size follows from its files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FreeSpace {
    /// A tenth of the volume, and at least 16 MiB.
    #[default]
    Usual,
    /// This many bytes; 0 makes the smallest volume.
    Bytes(u64),
    /// Millionths of the volume, up to 950,000.
    Ppm(u32),
}

impl FreeSpace {
    /// Plans the smallest volume that holds the tree and has this free space.
    ///
    /// # Errors
    /// As [`plan_smallest`].
    pub fn plan_volume<'a>(
        self,
        options: &FormatOptions,
        tree: &'a mut Tree,
    ) -> Result<VolumePlan<'a>> {
        match self {
            Self::Usual => plan_smallest_with_free_share(
                options,
                tree,
                DEFAULT_FREE_PPM,
                MIN_DEFAULT_FREE_BYTES,
            ),
            Self::Bytes(free) => plan_smallest(options, tree, free),
            Self::Ppm(part) => plan_smallest_with_free_share(options, tree, part, 0),
        }
    }
}

/// Plans the smallest volume that holds the tree and has `part_ppm` millionths of its size free.
fn plan_smallest_with_free_share<'a>(
    options: &FormatOptions,
    tree: &'a mut Tree,
    part_ppm: u32,
    at_least_bytes: u64,
) -> Result<VolumePlan<'a>> {
    const PPM: u128 = 1_000_000;
    let part = u128::from(part_ppm.min(MAX_FREE_PPM));
    let mut free_bytes = at_least_bytes;
    let mut most = None;
    for turn in 0..MAX_ITERATIONS {
        let len = match plan_smallest(options, tree, free_bytes) {
            Ok(plan) => u128::from(plan.layout.len_bytes()),
            Err(FormatError::TooLarge { .. }) if turn > 0 => break,
            Err(error) => return Err(error),
        };
        let free = u128::from(free_bytes);
        let missing = (len.saturating_mul(part) / PPM).saturating_sub(free);
        if missing == 0 {
            return plan_smallest(options, tree, free_bytes);
        }
        let most = *most.get_or_insert(len.saturating_mul(MAX_GROWTH_FACTOR));
        if len > most {
            break;
        }
        // Added free space enlarges the volume, and thus the free share and the metadata; the next
        // iteration corrects for that.
        let more = missing
            .saturating_mul(PPM)
            .div_ceil(PPM.saturating_sub(part))
            .max(len / MIN_GROWTH_DIVISOR);
        free_bytes = u64::try_from(free.saturating_add(more)).unwrap_or(u64::MAX);
    }
    Err(FormatError::Misuse(
        "so much of a volume does not stay free: tables and what is reserved (-m) take the rest"
            .into(),
    ))
}

/// Share of [`FreeSpace::Usual`], in millionths.
const DEFAULT_FREE_PPM: u32 = 100_000;
/// Minimum of [`FreeSpace::Usual`], in bytes.
const MIN_DEFAULT_FREE_BYTES: u64 = 16 << 20;
/// Largest free share in millionths.
const MAX_FREE_PPM: u32 = 950_000;
/// Limit of iterations; at 90 % each leaves two thirds of the missing space.
const MAX_ITERATIONS: usize = 60;
/// Minimum growth per iteration, as a divisor of the size, so that the loop ends.
const MIN_GROWTH_DIVISOR: u128 = 4096;
/// Growth factor beyond which no solution exists.
const MAX_GROWTH_FACTOR: u128 = 1024;
