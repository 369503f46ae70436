//! Differences that are ours and not yet mended. Every row must still be shown by a case, so
//! that who mends one deletes it.

use crate::verdict::Known;

pub const OPEN: &[Known] = &[];
