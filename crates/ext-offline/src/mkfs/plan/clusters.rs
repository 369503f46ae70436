//! File runs in clusters: a block has the same offset in its disk cluster as in its file cluster.
//!
//! ```text
//!   file      | . . d d | d . . . |    (4 blocks of a cluster)
//!   touched   |    0    |    1    |
//!   allocated |   96    |   104   | ─▶ d d at 98, d at 104
//! ```

use crate::mkfs::DiskRun;

/// Returns the file clusters that the runs touch, ascending: first cluster, and count.
#[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
pub(super) fn touched_clusters(runs: &[(u32, u32)], ratio: u64) -> Vec<DiskRun> {
    let mut all: Vec<DiskRun> = vec![];
    for (from, blocks) in runs.iter().filter(|run| run.1 > 0) {
        let (from, end) = (u64::from(*from), u64::from(*from).saturating_add(u64::from(*blocks)));
        let (first, end) = (from / ratio, end.div_ceil(ratio));
        match all.last_mut() {
            Some(last) if last.0.saturating_add(last.1) >= first => {
                last.1 = end.saturating_sub(last.0)
            }
            _ => all.push((first, end.saturating_sub(first))),
        }
    }
    all
}

/// Returns the disk blocks of the runs, whose clusters are `touched` and allocated at `taken`.
pub(super) fn runs_in_clusters(
    runs: &[(u32, u32)],
    touched: &[DiskRun],
    taken: &[DiskRun],
    ratio: u64,
) -> Option<Vec<DiskRun>> {
    // Stretches of whole clusters, by their first file block.
    let mut stretches: Vec<(u64, DiskRun)> = vec![];
    let mut taken = taken.iter().copied();
    let mut place = (0, 0);
    for (first, count) in touched {
        let (mut at, mut blocks) = (first.saturating_mul(ratio), count.saturating_mul(ratio));
        while blocks > 0 {
            if place.1 == 0 {
                place = taken.next()?;
                continue;
            }
            let here = blocks.min(place.1);
            stretches.push((at, (place.0, here)));
            place = (place.0.saturating_add(here), place.1.saturating_sub(here));
            (at, blocks) = (at.saturating_add(here), blocks.saturating_sub(here));
        }
    }
    let mut found = vec![];
    let mut nth = 0;
    for (from, blocks) in runs {
        let (mut from, end) =
            (u64::from(*from), u64::from(*from).saturating_add(u64::from(*blocks)));
        while from < end {
            let (at, (start, count)) = *stretches.get(nth)?;
            if from >= at.saturating_add(count) {
                nth = nth.saturating_add(1);
                continue;
            }
            let here = at.saturating_add(count).min(end).saturating_sub(from);
            found.push((start.saturating_add(from.checked_sub(at)?), here));
            from = from.saturating_add(here);
        }
    }
    Some(found)
}

/// Returns the first block of each cluster.
#[allow(clippy::arithmetic_side_effects, reason = "no size of a new volume is 0")]
pub(super) fn cluster_starts(taken: &[DiskRun], ratio: u64) -> impl Iterator<Item = DiskRun> {
    let starts = taken.iter().flat_map(move |(start, count)| {
        (0..count / ratio).map(move |nth| (start.saturating_add(nth.saturating_mul(ratio)), 1))
    });
    // With one block per cluster, runs stay merged.
    let merges = ratio == 1;
    let whole = taken.iter().copied().filter(move |_| merges);
    whole.chain(starts.filter(move |_| !merges))
}

/// Returns the first `blocks` blocks of the runs.
pub(super) fn truncate_runs(places: Vec<DiskRun>, mut blocks: u64) -> Vec<DiskRun> {
    let mut kept = vec![];
    for (start, count) in places {
        let here = count.min(blocks);
        if here > 0 {
            kept.push((start, here));
        }
        blocks = blocks.saturating_sub(here);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_keep_their_offset_within_cluster() {
        let runs = [(2, 3), (5, 1), (17, 2), (30, 4)];
        let touched = touched_clusters(&runs, 4);
        assert_eq!(touched, [(0, 2), (4, 1), (7, 2)]);
        let taken = [(96, 4), (104, 4), (200, 12)];
        let found = runs_in_clusters(&runs, &touched, &taken, 4).unwrap();
        let expected = [(98, 2), (104, 1), (105, 1), (201, 2), (206, 4)];
        assert_eq!(found, expected);
        assert_eq!(runs_in_clusters(&runs, &touched, &taken[..2], 4), None);
        assert!(touched_clusters(&[], 4).is_empty());
    }

    #[test]
    fn extent_nodes_get_own_clusters() {
        let firsts =
            |taken: &[DiskRun], ratio| super::cluster_starts(taken, ratio).collect::<Vec<_>>();
        assert_eq!(firsts(&[(8, 8), (32, 4)], 4), [(8, 1), (12, 1), (32, 1)]);
        assert_eq!(firsts(&[(8, 8)], 1), [(8, 8)]);
        assert_eq!(truncate_runs(vec![(8, 8), (32, 4), (64, 4)], 10), [(8, 8), (32, 2)]);
    }
}
