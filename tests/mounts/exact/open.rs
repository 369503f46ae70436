//! Differences that are our bugs and still open. A case must show every row, so that a fix removes
//! its row.

use crate::exact::verdict::KnownDifference;

pub const OPEN_BUG_DIFFERENCES: &[KnownDifference] = &[];
