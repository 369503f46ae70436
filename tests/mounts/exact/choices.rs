//! Intentional differences, where we do more than the kernel's driver. A case must show every
//! row.

use crate::exact::verdict::KnownDifference;

pub const INTENDED_DIFFERENCES: &[KnownDifference] = &[
    KnownDifference {
        why: "space is reserved and zeroed in files that are mapped by blocks, too",
        shown_by: "fallocate zero 100+5000, given | Regular | Other | closed | watched",
        is: |case, d| {
            case.call.name.starts_with("fallocate")
                && ["0", "ENOSPC"].contains(&d.ours.as_str())
                && d.theirs == "EOPNOTSUPP"
        },
    },
    KnownDifference {
        why: "what fallocate refuses changes no time and no mode",
        shown_by: "fallocate plain 100+5000, given | EmptyDirectory | Member | append-only | watched",
        is: |case, d| {
            case.call.name.starts_with("fallocate")
                && !d.field.starts_with("answer")
                && !case.call.name.contains("punch")
        },
    },
    KnownDifference {
        why: "what is refused for want of space changes no time",
        shown_by: "pwrite in a hole | Regular | Fowner | open to all | not cached | full",
        is: |case, d| {
            case.volume == "full"
                && !case.call.name.contains("SET")
                && d.field.contains("time")
                && matches!(d.ours.as_str(), "same" | "(nothing)")
        },
    },
    KnownDifference {
        why: "what is refused changes no time",
        shown_by: "rename t to d whiteout | Directory | Root | plain | watched",
        is: |case, d| {
            (case.call.name.contains("whiteout") || case.call.name.contains("project"))
                && d.field.contains("time")
                && matches!(d.ours.as_str(), "same" | "(nothing)")
        },
    },
    KnownDifference {
        why: "a directory whose bytes cannot be read was not read",
        shown_by: "sendfile from it | Directory | Root | closed | watched",
        is: |case, d| {
            case.kind.is_directory()
                && ["sendfile", "splice"].iter().any(|name| case.call.name.starts_with(name))
                && d.field.ends_with(".atime")
                && d.has_values("same", "now")
        },
    },
    KnownDifference {
        why: "direct reads and writes need no alignment",
        shown_by: "open read direct | Regular | Owner | noatime flag | watched",
        is: |case, d| {
            case.call.name.contains("direct")
                && d.field.starts_with("answer")
                && d.theirs == "EINVAL"
        },
    },
    KnownDifference {
        why: "a block of attributes is given back once the inode has room for what is left",
        shown_by: "removexattr user.there | Regular | Other | access ACL | watched",
        is: |case, d| case.call.name.starts_with("removexattr") && d.field.ends_with(".blocks"),
    },
];
