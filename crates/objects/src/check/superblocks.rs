//! The copies of the superblock.

use super::CheckOptions;
use super::report::{DamageKind, Report, new_finding};
use crate::Error;
use crate::core::Core;

/// Checks that all four copies are the newest one, or the one before it.
pub(super) fn check_superblocks(core: &Core, report: &mut Report, options: &CheckOptions) {
    let newest = &core.checkpoints.superblock;
    for (copy, (at, found)) in newest.read_copies(&*core.log.io.disk).into_iter().enumerate() {
        let name = format!("copy {copy} of the superblock");
        let found = match found {
            Ok(found) => found,
            // A power cut while the store was created.
            Err(Error::NotAStore(_)) if newest.generation <= 1 => {
                let text = format!("{name} was not written yet");
                report.notes.push(new_finding(DamageKind::Superblock, text, Some(at), None));
                continue;
            }
            Err(error) => {
                let text = format!("{name}: {error}");
                report.add(options, new_finding(DamageKind::Superblock, text, Some(at), None));
                continue;
            }
        };
        if found == *newest {
            continue;
        }
        let behind = newest.generation.wrapping_sub(found.generation);
        // The previous one may describe a longer or shorter store.
        let is_same_store = found.id == newest.id;
        if behind == 1 && is_same_store {
            // Copies are written two at a time: a power cut came between.
            let text = format!("{name} is one checkpoint old");
            report.notes.push(new_finding(DamageKind::Superblock, text, Some(at), None));
        } else {
            let text = match (is_same_store, behind) {
                (true, 0) => format!("{name} differs from the newest"),
                (true, _) => format!("{name} is {behind} checkpoints old: a write was lost"),
                (false, _) => format!("{name} is of another store"),
            };
            report.add(options, new_finding(DamageKind::Superblock, text, Some(at), None));
        }
    }
}
