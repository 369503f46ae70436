//! Differences that are ours and not yet mended. Every row must still be shown by a case, so
//! that who mends one deletes it.

use crate::verdict::Known;

pub const OPEN: &[Known] = &[
    Known {
        why: "statx tells no time of birth: the kernel asks for it by FUSE_STATX",
        shown_by: "lchown group | Directory | Member | setuid of root | watched",
        is: |_, d| d.field.ends_with(".btime") || d.field.ends_with(".statx mask"),
    },
    Known {
        why: "reading what is cached changes no time of access",
        shown_by: "open both sync | Regular | Other | append-only parent | watched",
        is: |_, d| d.field.ends_with(".atime") && (d.theirs == "now" || d.is("same", "earlier")),
    },
    Known {
        why: "O_NOATIME is not heard",
        shown_by: "names noatime, given | Directory | Owner | setuid append-only | watched",
        is: |case, d| {
            d.field.ends_with(".atime") && d.ours == "now" && case.call.name.contains("noatime")
        },
    },
    Known {
        why: "time of attributes is stale after flags changed",
        shown_by: "pwrite start | Directory | Fowner | immutable | watched",
        is: |case, d| {
            d.field.ends_with(".ctime")
                && (d.ours == "earlier" || (case.call.name.contains("SET") && d.is("same", "now")))
        },
    },
    Known {
        why: "O_TMPFILE is refused",
        shown_by: "open write tmpfile excl | Directory | Other | two names | watched",
        is: |case, d| case.call.name.contains("tmpfile") && d.field.starts_with("answer"),
    },
    Known {
        why: "RENAME_WHITEOUT is refused",
        shown_by: "rename t to o whiteout | Regular | Owner | setgid parent | watched",
        is: |case, d| {
            case.call.name.contains("whiteout")
                && d.field.starts_with("answer 00 rename")
                && d.ours == "EINVAL"
        },
    },
    Known {
        why: "immutable and append-only files can be opened for writing",
        shown_by: "mapped store second page, given | Regular | Other | append-only | watched",
        is: |case, d| case.state.has_flags() && d.field.contains("open") && d.is("open", "EPERM"),
    },
    Known {
        why: "append-only files can be given other times, in part, and be cut to their size",
        shown_by: "futimens one | Regular | Owner | append-only | watched",
        is: |case, d| {
            case.state.has_flags()
                && d.field.starts_with("answer")
                && d.is("0", "EPERM")
                && !case.call.name.contains("SET")
        },
    },
    Known {
        why: "flags are compared after kinds where attributes are set",
        shown_by: "setxattr default list | Regular | Other | setuid append-only | not cached",
        is: |case, d| {
            case.state.has_flags() && case.call.name.contains("setxattr") && d.theirs == "EPERM"
        },
    },
    Known {
        why: "setuid is taken away in vain where a write is refused",
        shown_by: "open write creat append nofollow | Regular | Member | setuid append-only | watched",
        is: |case, d| {
            case.state.name == "setuid append-only"
                && d.field.contains("ctime")
                && d.is("now", "same")
        },
    },
    Known {
        why: "write-back of what an immutable file was mapped for fails at another call",
        shown_by: "syncfs, given | EmptyDirectory | Member | setgid without execution | watched",
        is: |case, d| (d.is("EPERM", "0") || d.is("EIO", "0")) && case.call.name.contains("sync"),
    },
    Known {
        why: "unknown flags and projects are taken",
        shown_by: "FSSETXATTR project, given | Directory | Owner | setgid of a foreign group | watched",
        is: |case, d| {
            d.field.starts_with("answer")
                && d.is("0", "EOPNOTSUPP")
                && case.call.name.contains("SET")
        },
    },
    Known {
        why: "an owner changes the flags of an immutable file",
        shown_by: "FSSETXATTR nodump, given | EmptyDirectory | Owner | immutable | watched",
        is: |case, d| {
            case.call.name.contains("SET") && case.state.has_flags() && d.is("0", "EPERM")
        },
    },
    Known {
        why: "an attribute without a name has another errno",
        shown_by: "setxattr user, no name create | Directory | Member | setgid of a foreign group | watched",
        is: |case, d| case.call.name.contains("no name") && d.is("EOPNOTSUPP", "EINVAL"),
    },
    Known {
        why: "attributes of an unknown kind are absent",
        shown_by: "removexattr nothing.there | EmptyDirectory | Fowner | setgid without execution | watched",
        is: |case, d| case.call.name.contains("nothing.there") && d.is("ENODATA", "EOPNOTSUPP"),
    },
    Known {
        why: "an access list that is not there cannot be removed",
        shown_by: "removexattr system.posix_acl_default | Directory | Fowner | setgid of a foreign group | watched",
        is: |case, d| case.call.name.starts_with("removexattr system") && d.is("ENODATA", "0"),
    },
    Known {
        why: "times beyond the format wrap",
        shown_by: "utimens far | EmptyDirectory | Owner | closed | watched",
        is: |case, d| case.call.name.starts_with("utimens far") && d.field.contains("time"),
    },
    Known {
        why: "setuid and setgid stay after punching a hole",
        shown_by: "fallocate punch 100+5000, given | Regular | Other | setuid | watched",
        is: |case, d| case.call.name.contains("punch") && d.field.contains(".mode"),
    },
    Known {
        why: "setgid without execution stays when a user outside of the group writes",
        shown_by: "sendfile into it, given | Regular | Other | setgid without execution | watched",
        is: |case, d| {
            d.field.contains(".mode")
                && case.state.name.contains("without execution")
                && d.ours.starts_with("10")
        },
    },
    Known {
        why: "setgid stays when an owner outside of the group sets an access list",
        shown_by: "setxattr same access list | Directory | Fowner | setgid without execution | watched",
        is: |case, d| d.field.contains(".mode") && case.call.name.contains("setxattr"),
    },
    Known {
        why: "chown of nothing forgets who may, and setgid",
        shown_by: "fchown to -1:-1, given | Regular | Owner | setgid of a foreign group | watched",
        is: |case, _| case.call.name.contains("chown") && case.call.name.contains("-1:-1"),
    },
    Known {
        why: "a directory that was removed or replaced keeps its time of attributes",
        shown_by: "rename d to t | EmptyDirectory | Fowner | parent that inherits flags | watched",
        is: |case, d| {
            ["rename", "rmdir"].iter().any(|name| case.call.name.starts_with(name))
                && d.field == "observer: held.ctime"
        },
    },
    Known {
        why: "an attribute that is set to what it is has a new time of attributes",
        shown_by: "setxattr default list | Directory | Root | access ACL | watched",
        is: |case, d| {
            case.call.name.contains("setxattr") && d.field.contains("ctime") && d.is("now", "same")
        },
    },
    Known {
        why: "the kernel runs a file with the setuid bit that it has lost",
        shown_by: "run after punch | Program | Owner | setuid of root | not cached",
        is: |case, d| case.call.name.starts_with("run after") && d.field.ends_with(" run"),
    },
    Known {
        why: "readers keep what asynchronous direct writes replaced",
        shown_by: "asynchronous direct writes beside a reader | Regular | Root | plain | not cached",
        is: |case, d| case.call.name.starts_with("asynchronous") && d.field.contains("stale"),
    },
    Known {
        why: "a handle is stale once the kernel has forgotten its file",
        shown_by: "handles of files that are not cached | Regular | Root | plain | not cached",
        is: |case, d| case.call.name.starts_with("handles") && d.ours == "ESTALE",
    },
    Known {
        why: "overlayfs cannot use a mount as its upper layer",
        shown_by: "a layer above, with whiteouts | Regular | Root | plain | not cached",
        is: |case, d| case.call.name.starts_with("a layer above") && d.field.contains("line"),
    },
];
