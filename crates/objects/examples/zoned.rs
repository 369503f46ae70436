//! A layout for a device of zones that are written in order: shingled disks, zoned flash.
//!
//! A segment is a zone. Such a device has few zones open at a time, and what is dead in one costs
//! nothing until the zone is reset, which a segment's discard is. So two streams will do: what
//! is written and what leads to it goes to one zone, what survived goes to another. Cleaning takes
//! the oldest of what is worth it: a zone that was left alone for long has what stays.
//!
//! `cargo run -p draconis-objects --example zoned` puts it to the checks that every layout passes.

use draconis_objects::layout::{Layout, PayloadKind, StoreDimensions, conform, register};

/// The number by which stores know it.
pub const NUMBER: u16 = 300;

/// See the head of the file.
struct Zoned(StoreDimensions);

/// Makes one.
pub fn make(site: &StoreDimensions) -> Box<dyn Layout> {
    Box::new(Zoned(*site))
}

impl Layout for Zoned {
    fn site(&self) -> &StoreDimensions {
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

    fn read_bytes(&self) -> usize {
        // A zone is read from its beginning on.
        self.0.at_most(1 << 20, 1)
    }

    fn reads_ahead(&self) -> usize {
        2
    }

    fn node_bytes(&self) -> usize {
        self.0.at_most(8 << 10, 8)
    }

    fn cleaning_benefit(&self, used: u64, len: u64, age: u64) -> f64 {
        (1.0 - used as f64 / len as f64) * age as f64
    }
}

fn main() {
    let kind = register(NUMBER, make).expect("a number of our own");
    conform::check_all(kind);
    println!("the layout does what every layout does");
}
