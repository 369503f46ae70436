//! Differences that are ours and not yet mended. Every row must still be shown by a case, so
//! that who mends one deletes it.

use crate::verdict::Known;

pub const OPEN: &[Known] = &[
    Known {
        why: "statx tells no time of birth: the kernel asks for it by FUSE_STATX",
        is: |case, d| d.field.ends_with(".btime") || d.field.ends_with(".statx mask"),
    },
    Known {
        why: "reading what is cached changes no time of access",
        is: |case, d| {
            d.field.ends_with(".atime")
                && d.ours == "same"
                && (d.theirs == "now" || d.theirs == "earlier")
                || d.field.ends_with(".atime") && d.theirs == "now"
        },
    },
    Known {
        why: "O_NOATIME is not heard",
        is: |case, d| {
            d.field.ends_with(".atime") && d.ours == "now" && case.call.name.contains("noatime")
        },
    },
    Known {
        why: "time of attributes is stale after flags changed",
        is: |case, d| {
            d.field.ends_with(".ctime")
                && (d.ours == "earlier" || (case.call.name.contains("SET") && d.is("same", "now")))
        },
    },
    Known {
        why: "O_TMPFILE is refused",
        is: |case, d| case.call.name.contains("tmpfile") && d.field.starts_with("answer"),
    },
    Known {
        why: "RENAME_WHITEOUT is refused",
        is: |case, d| {
            case.call.name.contains("whiteout")
                && d.field.starts_with("answer 0 rename")
                && d.ours == "EINVAL"
        },
    },
    Known {
        why: "immutable and append-only files can be opened for writing",
        is: |case, d| {
            case.state.has_flags()
                && d.field.starts_with("answer")
                && (d.theirs == "EPERM" || d.theirs == "(nothing)" || d.ours == "(nothing)")
        },
    },
    Known {
        why: "write-back of what an immutable file was mapped for fails at another call",
        is: |case, d| d.is("EPERM", "0") && case.call.name.contains("sync"),
    },
    Known {
        why: "unknown flags and projects are taken",
        is: |case, d| {
            d.field.starts_with("answer")
                && d.is("0", "EOPNOTSUPP")
                && case.call.name.contains("SET")
        },
    },
    Known {
        why: "FSSETXATTR changes an immutable file",
        is: |case, d| case.call.name.starts_with("FSSETXATTR") && case.state.has_flags(),
    },
    Known {
        why: "an attribute without a name has another errno",
        is: |case, d| case.call.name.contains("no name") && d.is("EOPNOTSUPP", "EINVAL"),
    },
    Known {
        why: "attributes of an unknown kind are absent",
        is: |case, d| case.call.name.contains("nothing.there") && d.is("ENODATA", "EOPNOTSUPP"),
    },
    Known {
        why: "an access list that is not there cannot be removed",
        is: |case, d| case.call.name.starts_with("removexattr system") && d.is("ENODATA", "0"),
    },
    Known {
        why: "times beyond the format wrap",
        is: |case, d| case.call.name.starts_with("utimens far") && d.field.contains("time"),
    },
    Known {
        why: "setuid and setgid stay after punching a hole",
        is: |case, d| case.call.name.contains("punch") && d.field.contains(".mode"),
    },
    Known {
        why: "setgid without execution stays when a user outside of the group writes",
        is: |case, d| {
            d.field.contains(".mode")
                && case.state.name.contains("without execution")
                && d.ours.starts_with("10")
        },
    },
    Known {
        why: "setgid stays when an owner outside of the group sets an access list",
        is: |case, d| d.field.contains(".mode") && case.call.name.contains("setxattr"),
    },
    Known {
        why: "chown of nothing forgets who may, and setgid",
        is: |case, d| {
            case.call.name.contains("chown")
                && (case.call.name.contains("-1:-1") || case.call.name.contains("nobody"))
        },
    },
];
