//! Any bytes as changes of a store's image, which is opened, read and written to. Sums are
//! not looked at: they are no secret, and would keep everything out.
#![no_main]

use std::sync::OnceLock;

use draconis_objects::torture::{self, Omission, Settings};
use libfuzzer_sys::fuzz_target;

static BASES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();

// | which | place (3 bytes) len bytes.. | place len bytes.. | ..
fuzz_target!(|bytes: &[u8]| {
    let bases = BASES.get_or_init(|| (0..8).filter_map(|seed| torture::base(seed).ok()).collect());
    let Some((&which, mut rest)) = bytes.split_first() else { return };
    let mut image = bases[usize::from(which & 7) % bases.len()].clone();
    while let [a, b, c, len, more @ ..] = rest {
        let at = usize::from(*a) | usize::from(*b) << 8 | usize::from(*c) << 16;
        let (now, then) = more.split_at((usize::from(*len) + 1).min(more.len()));
        for (nth, byte) in now.iter().enumerate() {
            let at = (at + nth) % image.len();
            image[at] = *byte;
        }
        rest = then;
    }
    if which & 0x80 != 0 {
        // The bytes themselves.
        image.clear();
        image.extend_from_slice(&bytes[1..]);
        image.resize(1 << 20, 0);
    }
    torture::set(Settings { without: Some(Omission::Sums), ..Settings::USUAL });
    let _ = torture::exercise(image);
});
