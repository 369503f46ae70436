//! What FUSE cannot do, each with the reason. Every row must still be shown by a case.

use crate::verdict::Known;

pub const LIMITS: &[Known] = &[
    Known {
        why: "statx tells no flags of files on FUSE: the kernel leaves out what the server says",
        is: |_, d| d.field.contains(".statx attributes"),
    },
    Known {
        why: "statfs gives the number of FUSE, by which programs know it",
        is: |case, d| case.call.name == "statfs" && d.field.ends_with("kind"),
    },
    Known {
        why: "the kernel seeks in directories on FUSE by its own rule, without asking",
        is: |case, d| case.call.name.starts_with("lseek") && d.field.starts_with("answer"),
    },
    Known {
        why: "access(2) is answered by the kernel alone, which does not know what is immutable",
        is: |case, d| case.call.name.starts_with("access w") && d.is("0", "EPERM"),
    },
    Known {
        why: "the kernel compares kinds, permissions and flags of a rename before it asks us about flags of files",
        is: |case, d| {
            d.field.starts_with("answer")
                && ["EISDIR", "ENOTDIR", "EACCES", "EBUSY", "ENOTEMPTY"].contains(&d.ours.as_str())
                && d.theirs == "EPERM"
                && case.state.has_flags()
        },
    },
    Known {
        why: "an owner is asked for before it is known that FIFOs have no flags",
        is: |case, d| d.is("EPERM", "ENOTTY") && case.call.name.contains("SET"),
    },
];
