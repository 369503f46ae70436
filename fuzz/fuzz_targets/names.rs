//! Any bytes as a name: folded, shown without a key, and read back.
#![no_main]

use draconis_ext::format::{casefold, nokey};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|name: &[u8]| {
    if let Some(folded) = casefold::fold_name(name) {
        assert!(std::str::from_utf8(&folded).is_ok());
    }
    let _ = nokey::no_key_target(name);
    let _ = nokey::NoKeyName::parse(name);
    if (1..=255).contains(&name.len()) {
        let shown = nokey::no_key_name((0, 0), name);
        assert!(nokey::NoKeyName::parse(&shown).is_some_and(|read| read.matches(name)));
    }
});
