//! What FUSE cannot do, each with the reason. Every row must still be shown by a case.

use crate::calls::Group;
use crate::case::Kind;
use crate::verdict::Known;

pub const LIMITS: &[Known] = &[
    Known {
        why: "statx tells no flags of files on FUSE: the kernel leaves out what the server says",
        shown_by: "lchown group | Directory | Member | setuid of root | watched",
        is: |_, d| d.field.contains(".statx attributes"),
    },
    Known {
        why: "statfs gives the number of FUSE, by which programs know it",
        shown_by: "statfs | EmptyDirectory | Owner | append-only | watched",
        is: |case, d| case.call.name == "statfs" && d.field.ends_with("kind"),
    },
    Known {
        why: "the kernel seeks in directories on FUSE by its own rule, without asking",
        shown_by: "lseek, given | EmptyDirectory | Member | plain | watched",
        is: |case, d| case.call.name.starts_with("lseek") && d.field.starts_with("answer"),
    },
    Known {
        why: "access(2) is answered by the kernel alone, which does not know what is immutable",
        shown_by: "access w | EmptyDirectory | Root | immutable | watched",
        is: |case, d| case.call.name.starts_with("access w") && d.is("0", "EPERM"),
    },
    Known {
        why: "the kernel compares kinds, permissions and flags of a rename before it asks us about flags of files",
        shown_by: "rmdir t/ | Regular | Owner | immutable parent | watched",
        is: |case, d| {
            d.field.starts_with("answer")
                && ["EISDIR", "ENOTDIR", "EACCES", "EBUSY", "ENOTEMPTY"].contains(&d.ours.as_str())
                && d.theirs == "EPERM"
                && case.call.group == Group::Name
                && case.state.has_flags()
        },
    },
    Known {
        why: "an owner is asked for before it is known that FIFOs have no flags",
        shown_by: "SETFLAGS none | Fifo | Other | plain | watched",
        is: |case, d| d.is("EPERM", "ENOTTY") && case.call.name.contains("SET"),
    },
    Known {
        why: "what goes through a FIFO changes no time of it on FUSE",
        shown_by: "open both nofollow | Fifo | Member | plain | watched",
        is: |case, d| {
            case.kind == Kind::Fifo
                && d.field.contains("time")
                && matches!(d.ours.as_str(), "same" | "(nothing)")
        },
    },
];
