//! Random walks over the calls, in one directory, compared after each step.
//!
//! A walk is determined by its seed. After a known difference, it continues in new directories.
//! After an unexplained one, the walk is repeated with fewer and fewer steps, and the shortest that
//! still shows it is printed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use draconis_device::Random;

use crate::calls::{self, Call, CallContext, Group};
use crate::case::{self, Case, Kind, STATES};
use crate::look::{self, Before, Fields};
use crate::sys;
use crate::verdict::Verdict;
use crate::volumes::{self, Pair};
use crate::who::Who;

/// A call by a user, and the names that it works on.
#[derive(Clone, Copy)]
struct Step {
    call: &'static Call,
    who: Who,
    names: [&'static str; 4],
}

impl Step {
    fn random(random: &mut Random) -> Self {
        let calls = calls::all();
        let call = loop {
            let call = &calls[random.below(calls.len() as u64) as usize];
            // Descriptors from root are compared by the table; handles need the top directory.
            if call.group != Group::Run && !call.given {
                break call;
            }
        };
        let who = Who::ALL[random.below(Who::ALL.len() as u64) as usize];
        let names = ["t", "o", "n", "d"].map(|usual| {
            let others = ["t", "o", "n", "d", "a", "b", "d/x", "d/y"];
            if random.below(2) == 0 { usual } else { others[random.below(8) as usize] }
        });
        Self { call, who, names }
    }

    fn case(&self) -> Case {
        let Self { call, who, .. } = *self;
        Case { call, kind: Kind::Regular, who, state: &STATES[1], watched: false, volume: "walk" }
    }

    fn run(&self, top: &Path, dir: &Path) -> Fields {
        let mut acts = CallContext::new(dir, top, self.who);
        let [t, o, n, d] = self.names.map(|name| dir.join(name));
        (acts.t, acts.o, acts.n, acts.d) = (t, o, n, d);
        (self.call.run)(&mut acts);
        let mut fields = std::mem::take(&mut acts.answers);
        let seen = look::walk(dir);
        fields.extend(look::contents(dir, &seen));
        fields.extend(Before::default().relate("", seen, look::now()));
        // Times are compared only where the clock was waited for.
        fields.retain(|(key, _)| !key.contains("time") || key.starts_with("answer"));
        fields
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [t, o, n, d] = self.names;
        write!(f, "{} by {:?}, with t={t} o={o} n={n} d={d}", self.call.name, self.who)
    }
}

/// Volumes of the walks, and the number of directories used.
struct Ground {
    pair: Pair,
    used: usize,
    /// Directories that are known to differ.
    different: BTreeSet<String>,
}

impl Ground {
    fn fresh(&mut self) -> [PathBuf; 2] {
        self.used += 1;
        [&self.pair.ours, &self.pair.theirs].map(|top| {
            let dir = top.join(format!("walk{}", self.used));
            case::make(&dir, Kind::Regular, &STATES[1]);
            dir
        })
    }

    /// Runs a step on both; returns true if they are equal.
    fn step(&self, step: &Step, dirs: &[PathBuf; 2], verdict: &mut Verdict) -> bool {
        let ours = step.run(&self.pair.ours, &dirs[0]);
        let theirs = step.run(&self.pair.theirs, &dirs[1]);
        verdict.compare(&step.case(), &ours, &theirs)
    }

    /// Returns true if the steps lead to an unexplained difference.
    fn fails(&mut self, steps: &[Step]) -> bool {
        let (dirs, mut verdict) = (self.fresh(), crate::verdict());
        let alike = |step| self.step(step, &dirs, &mut verdict);
        let _ = steps.iter().all(alike);
        verdict.unknown() > 0
    }

    /// Returns the shortest sequence of these steps that still fails.
    fn fewest(&mut self, mut steps: Vec<Step>) -> Vec<Step> {
        let mut len = 1;
        while len < steps.len() {
            let tail = steps[steps.len() - len..].to_vec();
            if self.fails(&tail) {
                steps = tail;
                break;
            }
            len *= 2;
        }
        let mut at = 0;
        while at < steps.len() && steps.len() > 1 {
            let mut fewer = steps.clone();
            fewer.remove(at);
            if self.fails(&fewer) {
                steps = fewer;
            } else {
                at += 1;
            }
        }
        steps
    }

    fn walk(&mut self, seed: u64, steps: usize) {
        let mut random = Random::new(seed);
        let mut done: Vec<Step> = vec![];
        let mut dirs = self.fresh();
        for number in 0..steps {
            let step = Step::random(&mut random);
            done.push(step);
            let mut verdict = crate::verdict();
            let alike = self.step(&step, &dirs, &mut verdict);
            if verdict.unknown() > 0 {
                let report = verdict.report();
                let fewest = self.fewest(std::mem::take(&mut done));
                let fewest: Vec<_> = fewest.iter().map(Step::to_string).collect();
                panic!("seed {seed}, step {number}:\n{report}{}", fewest.join("\n"));
            }
            if !alike {
                self.different.insert(format!("walk{}", self.used));
                done.clear();
                dirs = self.fresh();
            }
        }
    }
}

#[test]
fn random_walks_lead_to_the_same_places() {
    if !volumes::can("walking beside the kernel's driver") {
        return;
    }
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (seeds, steps) = match number("DRACONIS_EXACT_SEED") {
        Some(seed) => (seed..seed + 1, number("DRACONIS_EXACT_STEPS").unwrap_or(10_000)),
        None => (1..4, 300),
    };
    sys::own_umask(0o022);
    let mut ground = Ground {
        pair: Pair::new("ext2", "1024", "512M", "rw,suid,dev"),
        used: 0,
        different: BTreeSet::new(),
    };
    for seed in seeds {
        ground.walk(seed, steps as usize);
    }
    ground.pair.judge(&ground.different);
}
