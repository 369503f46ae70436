//! Layout for a device with zones that are written sequentially: shingled disks, zoned flash.
//!
//! A segment is a zone. Such a device has few open zones, and dead bytes cost nothing until the
//! zone is reset, which is the segment's discard. So two streams are enough: new payloads and the
//! index share a zone, and cleaned payloads go to another. The cleaner takes the oldest segments
//! with a benefit: old zones hold long-lived bytes.
//!
//! `cargo run -p draconis-objects --example zoned` runs the conformance checks on it.

use draconis_objects::conform;
use draconis_objects::layout::{Layout, PayloadKind, StoreDimensions, register_layout};

/// Layout number on the disk.
pub const LAYOUT_NUMBER: u16 = 300;

/// Zoned layout.
struct ZonedLayout(StoreDimensions);

/// Creates the layout.
pub fn make_zoned_layout(site: &StoreDimensions) -> Box<dyn Layout> {
    Box::new(ZonedLayout(*site))
}

impl Layout for ZonedLayout {
    fn dimensions(&self) -> &StoreDimensions {
        &self.0
    }

    fn streams(&self) -> usize {
        2
    }

    fn stream_of(&self, kind: PayloadKind, _is_trickle: bool) -> usize {
        usize::from(matches!(kind, PayloadKind::Moved { .. }))
    }

    fn index_stream(&self) -> usize {
        0
    }

    fn cleaner_read_bytes(&self) -> usize {
        // A zone is read from its start.
        self.0.cap_to_segment_part(1 << 20, 1)
    }

    fn cleaner_reads_ahead(&self) -> usize {
        2
    }

    fn node_bytes(&self) -> usize {
        self.0.cap_to_segment_part(8 << 10, 8)
    }

    fn cleaning_benefit(&self, used: u64, len: u64, age: u64) -> f64 {
        (1.0 - used as f64 / len as f64) * age as f64
    }
}

fn main() {
    let kind = register_layout(LAYOUT_NUMBER, make_zoned_layout).expect("a number of our own");
    conform::check_all(kind);
    println!("the layout does what every layout does");
}
