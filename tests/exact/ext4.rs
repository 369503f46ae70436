//! Differences on ext4 volumes only. A case must show every row.

use crate::verdict::Known;

pub const TABLE: &str = "ext4.rs";

pub const ROWS: &[Known] = &[
    Known {
        why: "the kernel does not ask on FUSE before it refuses to collapse and to insert",
        shown_by: "fallocate collapse 0+4096, given | Regular | Fowner | plain | watched",
        is: |case, d| {
            let name = &case.call.name;
            let moves = ["collapse", "insert"].iter().any(|word| name.contains(word));
            name.starts_with("fallocate") && moves && d.ours == "EOPNOTSUPP"
        },
    },
    Known {
        why: "a directory stays mapped by extents",
        shown_by: "SETFLAGS none | EmptyDirectory | Root | setuid append-only | watched",
        is: |case, d| case.call.name.starts_with("SETFLAGS") && d.is("EOPNOTSUPP", "0"),
    },
];

/// Returns true if a row names this case.
pub fn shows(case: &str) -> bool {
    ROWS.iter().any(|row| row.shown_by == case)
}
