//! What FUSE cannot do, each with the reason. Every row must still be shown by a case.

use crate::verdict::Known;

pub const LIMITS: &[Known] = &[Known {
    why: "statx tells no flags of files on FUSE: the kernel leaves out what the server says",
    is: |_, difference| difference.field.contains(".statx attributes"),
}];
