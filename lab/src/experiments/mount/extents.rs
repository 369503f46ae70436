//! Fragmentation of files on a volume, as counted by `debugfs` of e2fsprogs, which is
//! independent of the programs measured.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};

/// Returns the mean number of extents of the files with blocks below `tree`. An indirect block
/// between two data blocks splits an extent.
///
/// # Errors
/// debugfs is missing, or there are no such files.
pub fn mean_extents_per_file(image: &Path, tree: &str) -> anyhow::Result<f64> {
    let mut debugfs = Command::new("debugfs");
    debugfs.arg("-R").arg(format!("filefrag -r {tree}")).arg(image);
    let output = debugfs.output().context("debugfs of e2fsprogs")?;
    let (extents, files) = count_extents_and_files(&String::from_utf8_lossy(&output.stdout));
    ensure!(files > 0, "debugfs: {}", String::from_utf8_lossy(&output.stderr));
    Ok(extents as f64 / files as f64)
}

/// Counts extents and files in debugfs's output.
fn count_extents_and_files(told: &str) -> (u64, u64) {
    let of = |line: &str| -> Option<u64> {
        let (_, count) = line.strip_suffix(" contiguous extents")?.rsplit_once(": ")?;
        count.parse().ok().filter(|extents| *extents > 0)
    };
    told.lines().filter_map(of).fold((0, 0), |(sum, files), extents| (sum + extents, files + 1))
}

#[cfg(test)]
mod tests {
    #[test]
    fn filefrag_output_is_counted() {
        let told = "\
/tree/short: 1 contiguous extents
/tree/a: name: 3 contiguous extents
/tree/link: 0 contiguous extents
/tree/dir: 2 contiguous extents (dir)
";
        assert_eq!(super::count_extents_and_files(told), (4, 2));
    }
}
