//! What the numbers say, in plain words: ten lines, and what to do about them.

use crate::results::Results;

/// The profile and the guidance.
pub struct Words {
    /// The machine's storage in lines of plain words.
    pub profile: Vec<String>,
    /// What is good, what is bad, and what is ugly.
    pub guidance: Vec<(&'static str, Vec<String>)>,
}

/// Reads the results.
pub fn words(results: &Results) -> Words {
    let _ = results;
    Words { profile: vec![], guidance: vec![] }
}
