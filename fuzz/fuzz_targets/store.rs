//! Any bytes as a store's image, which is opened, read and written to. Sums are
//! not looked at: they are no secret, and would keep everything out.
#![no_main]

use std::sync::OnceLock;

use draconis_objects::torture::{self, InjectedFault, Settings};
use libfuzzer_sys::fuzz_target;

static BASES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();

fuzz_target!(|bytes: &[u8]| {
    let bases = BASES.get_or_init(|| (0..8).filter_map(|seed| torture::base(seed).ok()).collect());
    let Some(image) = torture::altered(bases, bytes) else { return };
    torture::set(Settings { fault: Some(InjectedFault::Sums), ..Settings::USUAL });
    let _ = torture::exercise(image);
});
