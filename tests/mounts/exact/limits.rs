//! Limits of FUSE, each with the reason. A case must show every row.

use crate::exact::calls::CallGroup;
use crate::exact::case::TargetKind;
use crate::exact::verdict::KnownDifference;
use crate::exact::who::TestUser;

pub const FUSE_LIMIT_DIFFERENCES: &[KnownDifference] = &[
    KnownDifference {
        why: "statx tells no flags of files on FUSE: the kernel leaves out what the server says",
        shown_by: "lchown group | Directory | Member | setuid of root | watched",
        is: |_, d| d.field.contains(".statx attributes"),
    },
    KnownDifference {
        why: "statfs gives the number of FUSE, by which programs know it",
        shown_by: "statfs | EmptyDirectory | Owner | append-only | watched",
        is: |case, d| case.call.name == "statfs" && d.field.ends_with("kind"),
    },
    KnownDifference {
        why: "the kernel seeks in directories on FUSE by its own rule, without asking",
        shown_by: "lseek, given | EmptyDirectory | Member | plain | watched",
        is: |case, d| case.call.name.starts_with("lseek") && d.field.starts_with("answer"),
    },
    KnownDifference {
        why: "access(2) is answered by the kernel alone, which does not know what is immutable",
        shown_by: "access w | EmptyDirectory | Root | immutable | watched",
        is: |case, d| case.call.name.starts_with("access w") && d.has_values("0", "EPERM"),
    },
    KnownDifference {
        why: "the kernel compares kinds, permissions and flags of a rename before it asks us about flags of files",
        shown_by: "rmdir t/ | Regular | Owner | immutable parent | watched",
        is: |case, d| {
            d.field.starts_with("answer")
                && ["EISDIR", "ENOTDIR", "EACCES", "EBUSY", "ENOTEMPTY"].contains(&d.ours.as_str())
                && d.theirs == "EPERM"
                && case.call.group == CallGroup::Name
                && (case.state.has_flags() || case.volume == "walk")
        },
    },
    KnownDifference {
        why: "the kernel compares kinds of files and lists before it asks us about flags of files",
        shown_by: "setxattr default list | Regular | Other | setuid append-only | not cached",
        is: |case, d| {
            case.state.has_flags()
                && case.kind == TargetKind::Regular
                && case.call.name.contains("xattr")
                && (d.has_values("EACCES", "EPERM") || d.has_values("0", "EPERM"))
        },
    },
    KnownDifference {
        why: "a link that the kernel has read is followed without asking",
        shown_by: "fchmod 6755 | LinkToFile | Other | plain | watched",
        is: |case, d| {
            matches!(
                case.kind,
                TargetKind::LinkToFile | TargetKind::LinkToDirectory | TargetKind::Dangling
            ) && d.field.ends_with(".atime")
                && d.has_values("same", "now")
        },
    },
    KnownDifference {
        why: "through a descriptor that is open already pages that are kept are read without asking",
        shown_by: "sendfile from it, given | Directory | Owner | sticky parent | watched",
        is: |case, d| case.call.given && d.field.ends_with(".atime") && d.has_values("same", "now"),
    },
    KnownDifference {
        why: "nothing is asked where nothing can be read",
        shown_by: "open read creat trunc | Regular | Root | two names | not cached",
        is: |case, d| {
            (case.kind == TargetKind::Empty || case.call.name.contains("trunc"))
                && d.field.ends_with(".atime")
                && d.has_values("same", "now")
        },
    },
    KnownDifference {
        why: "who cuts a file may be in its group by one of several groups, of which we hear one",
        shown_by: "open read trunc | Regular | Member | setgid without execution | watched",
        is: |case, d| {
            case.call.name.contains("trunc")
                && case.who == TestUser::Member
                && case.state.name == "setgid without execution"
                && d.field.ends_with(".mode")
        },
    },
    KnownDifference {
        why: "an owner is asked for before it is known that FIFOs have no flags",
        shown_by: "SETFLAGS none | Fifo | Other | plain | watched",
        is: |case, d| d.has_values("EPERM", "ENOTTY") && case.call.name.contains("SET"),
    },
    KnownDifference {
        why: "what goes through a FIFO changes no time of it on FUSE",
        shown_by: "open both nofollow | Fifo | Member | plain | watched",
        is: |case, d| {
            case.kind == TargetKind::Fifo
                && d.field.contains("time")
                && matches!(d.ours.as_str(), "same" | "(nothing)")
        },
    },
];
