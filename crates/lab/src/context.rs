//! What an experiment is told: its parameters, its seed, where it may work.

use std::cell::RefCell;

use anyhow::{Context as _, anyhow};

use crate::stop::{Stop, Stopped};
use crate::store_profile::StoreProfile;
use crate::subject::RunEnvironment;
use crate::units;
use draconis_device::Random;

/// What an experiment is told.
pub struct Context {
    /// The parameters' values.
    pub values: Vec<(&'static str, String)>,
    /// What replays its chances.
    pub seed: u64,
    /// Which repetition this is; the first is 0.
    pub repetition: u64,
    /// Where it may work.
    pub workshop: RunEnvironment,
    /// Whether it should stop.
    pub stop: Stop,
    notes: RefCell<Vec<String>>,
    profiles: RefCell<Vec<StoreProfile>>,
}

impl Context {
    /// With these values.
    pub fn new(
        values: Vec<(&'static str, String)>,
        seed: u64,
        workshop: RunEnvironment,
        stop: Stop,
    ) -> Self {
        let (notes, profiles) = Default::default();
        Self { values, seed, repetition: 0, workshop, stop, notes, profiles }
    }

    /// The value of a parameter as it was written.
    ///
    /// # Errors
    /// If the experiment has none of that name.
    pub fn text(&self, name: &str) -> anyhow::Result<&str> {
        let value = self.values.iter().find(|(key, _)| *key == name);
        value.map(|(_, value)| value.as_str()).with_context(|| format!("no parameter {name}"))
    }

    /// A number or size.
    ///
    /// # Errors
    /// If it is none.
    pub fn number(&self, name: &str) -> anyhow::Result<u64> {
        let text = self.text(name)?;
        units::parse_amount(text).with_context(|| format!("{name}={text}: a number is needed"))
    }

    /// A list of numbers or sizes.
    ///
    /// # Errors
    /// If it is none.
    pub fn numbers(&self, name: &str) -> anyhow::Result<Vec<u64>> {
        let text = self.text(name)?;
        let parse = |one: &str| units::parse_amount(one).ok_or_else(|| anyhow!("{name}={text}"));
        text.split(',').map(parse).collect()
    }

    /// A list of numbers with fractions.
    ///
    /// # Errors
    /// If it is none.
    pub fn fractions(&self, name: &str) -> anyhow::Result<Vec<f64>> {
        let text = self.text(name)?;
        let parse = |one: &str| one.trim().parse().map_err(|_| anyhow!("{name}={text}"));
        text.split(',').map(parse).collect()
    }

    /// Chance for this repetition.
    pub fn rng(&self) -> Random {
        Random::new(self.seed.wrapping_add(self.repetition.wrapping_mul(0x1000_0001)))
    }

    /// Nothing, or that it is time to stop.
    ///
    /// # Errors
    /// [`Stopped`].
    pub fn check(&self) -> Result<(), Stopped> {
        self.stop.check()
    }

    /// Writes something down for the report, once.
    pub fn note(&self, text: impl Into<String>) {
        let text = text.into();
        let mut notes = self.notes.borrow_mut();
        if !notes.contains(&text) {
            notes.push(text);
        }
    }

    /// What was written down.
    pub fn take_notes(&self) -> Vec<String> {
        self.notes.take()
    }

    /// Whether the profile of a subject is known.
    pub fn has_profile(&self, subject: &str) -> bool {
        self.profiles.borrow().iter().any(|known| known.subject == subject)
    }

    /// Keeps the profile of a subject.
    pub fn keep_profile(&self, profile: StoreProfile) {
        self.profiles.borrow_mut().push(profile);
    }

    /// The profiles that were kept.
    pub fn take_profiles(&self) -> Vec<StoreProfile> {
        self.profiles.take()
    }
}
