//! Input of an experiment: parameters, seed, working directory.

use std::cell::RefCell;

use anyhow::{Context as _, anyhow};

use crate::stop::{RunStopped, StopFlag};
use crate::store_profile::StoreProfile;
use crate::subject::RunEnvironment;
use crate::units;
use draconis_device::Random;

/// Input of an experiment.
pub struct RunContext {
    /// Values of the parameters.
    pub values: Vec<(&'static str, String)>,
    /// Random seed.
    pub seed: u64,
    /// Number of this repetition, from 0.
    pub repetition: u64,
    /// Environment for creating files and subjects.
    pub workshop: RunEnvironment,
    /// Stop flag.
    pub stop: StopFlag,
    notes: RefCell<Vec<String>>,
    profiles: RefCell<Vec<StoreProfile>>,
}

impl RunContext {
    /// Creates a context with these parameter values.
    pub fn new(
        values: Vec<(&'static str, String)>,
        seed: u64,
        workshop: RunEnvironment,
        stop: StopFlag,
    ) -> Self {
        let (notes, profiles) = Default::default();
        Self { values, seed, repetition: 0, workshop, stop, notes, profiles }
    }

    /// Returns the text of a parameter.
    ///
    /// # Errors
    /// The experiment has no such parameter.
    pub fn text_parameter(&self, name: &str) -> anyhow::Result<&str> {
        let value = self.values.iter().find(|(key, _)| *key == name);
        value.map(|(_, value)| value.as_str()).with_context(|| format!("no parameter {name}"))
    }

    /// Returns a parameter as a number or size.
    ///
    /// # Errors
    /// The text is no number.
    pub fn number_parameter(&self, name: &str) -> anyhow::Result<u64> {
        let text = self.text_parameter(name)?;
        units::parse_amount(text).with_context(|| format!("{name}={text}: a number is needed"))
    }

    /// Returns a parameter as a list of numbers or sizes.
    ///
    /// # Errors
    /// The text is no such list.
    pub fn number_list_parameter(&self, name: &str) -> anyhow::Result<Vec<u64>> {
        let text = self.text_parameter(name)?;
        let parse = |one: &str| units::parse_amount(one).ok_or_else(|| anyhow!("{name}={text}"));
        text.split(',').map(parse).collect()
    }

    /// Returns a parameter as a list of decimal numbers.
    ///
    /// # Errors
    /// The text is no such list.
    pub fn fraction_list_parameter(&self, name: &str) -> anyhow::Result<Vec<f64>> {
        let text = self.text_parameter(name)?;
        let parse = |one: &str| one.trim().parse().map_err(|_| anyhow!("{name}={text}"));
        text.split(',').map(parse).collect()
    }

    /// Returns the random generator of this repetition.
    pub fn new_rng(&self) -> Random {
        Random::new(self.seed.wrapping_add(self.repetition.wrapping_mul(0x1000_0001)))
    }

    /// Fails if the run was asked to stop.
    ///
    /// # Errors
    /// [`RunStopped`].
    pub fn check_not_stopped(&self) -> Result<(), RunStopped> {
        self.stop.check_not_stopped()
    }

    /// Adds a note to the report, unless it is there already.
    pub fn add_note(&self, text: impl Into<String>) {
        let text = text.into();
        let mut notes = self.notes.borrow_mut();
        if !notes.contains(&text) {
            notes.push(text);
        }
    }

    /// Removes and returns the notes.
    pub fn take_notes(&self) -> Vec<String> {
        self.notes.take()
    }

    /// Returns true if the profile of a subject is known.
    pub fn has_profile(&self, subject: &str) -> bool {
        self.profiles.borrow().iter().any(|known| known.subject == subject)
    }

    /// Stores the profile of a subject.
    pub fn add_profile(&self, profile: StoreProfile) {
        self.profiles.borrow_mut().push(profile);
    }

    /// Removes and returns the stored profiles.
    pub fn take_profiles(&self) -> Vec<StoreProfile> {
        self.profiles.take()
    }
}
