//! What we do otherwise on purpose, since it is more than the kernel's driver does. Every row
//! must still be shown by a case.

use crate::verdict::Known;

pub const CHOICES: &[Known] = &[
    Known {
        why: "space is reserved and zeroed in files that are mapped by blocks, too",
        is: |case, d| case.call.name.starts_with("fallocate") && d.is("0", "EOPNOTSUPP"),
    },
    Known {
        why: "what fallocate refuses changes no time and no mode",
        is: |case, d| {
            case.call.name.starts_with("fallocate")
                && !d.field.starts_with("answer")
                && !case.call.name.contains("punch")
        },
    },
    Known {
        why: "direct reads and writes need no alignment",
        is: |case, d| {
            case.call.name.contains("direct")
                && d.field.starts_with("answer")
                && d.theirs == "EINVAL"
        },
    },
];
