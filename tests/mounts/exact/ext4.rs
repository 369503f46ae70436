//! Differences on ext4 volumes only. A case must show every row.

use crate::exact::verdict::KnownDifference;

pub const TABLE_NAME: &str = "ext4.rs";

pub const EXT4_DIFFERENCES: &[KnownDifference] = &[
    KnownDifference {
        why: "the kernel does not ask on FUSE before it refuses to collapse and to insert",
        shown_by: "fallocate collapse 0+4096, given | Regular | Fowner | plain | watched",
        is: |case, d| {
            let name = &case.call.name;
            let moves = ["collapse", "insert"].iter().any(|word| name.contains(word));
            name.starts_with("fallocate") && moves && d.ours == "EOPNOTSUPP"
        },
    },
    KnownDifference {
        why: "a directory stays mapped by extents",
        shown_by: "SETFLAGS none | EmptyDirectory | Root | setuid append-only | watched",
        is: |case, d| case.call.name.starts_with("SETFLAGS") && d.has_values("EOPNOTSUPP", "0"),
    },
];

/// Returns true if a row names this case.
pub fn is_example_case(case: &str) -> bool {
    EXT4_DIFFERENCES.iter().any(|row| row.shown_by == case)
}
