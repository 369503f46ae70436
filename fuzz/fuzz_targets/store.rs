//! Any bytes as a store's image, which is salvaged, opened, read and written to. Sums are
//! not looked at: they are no secret, and would keep everything out.
#![no_main]

use std::sync::OnceLock;

use draconis_objects::test_hooks::{InjectedFault, TestSettings};
use draconis_testkit::torture::{self};
use libfuzzer_sys::fuzz_target;

static BASES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();

fuzz_target!(|bytes: &[u8]| {
    let bases =
        BASES.get_or_init(|| (0..8).filter_map(|seed| torture::base_image(seed).ok()).collect());
    let Some(image) = torture::image_from_fuzz_input(bases, bytes) else { return };
    draconis_objects::test_hooks::set_thread_settings(TestSettings {
        fault: Some(InjectedFault::Sums),
        ..TestSettings::NORMAL
    });
    let _ = torture::salvage_image(image.clone());
    let _ = torture::exercise_image(image);
});
