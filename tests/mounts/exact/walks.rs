//! Random walks over the calls, in one directory, compared after each step.
//!
//! A walk is determined by its seed. After a known difference, it continues in new directories.
//! After an unexplained one, the walk is repeated with fewer and fewer steps, and the shortest that
//! still shows it is printed.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use draconis_device::Random;

use crate::exact::calls::{self, CallContext, CallGroup, SystemCallTest};
use crate::exact::case::{self, TARGET_STATES, TargetKind, TestCase};
use crate::exact::look::{self, EarlierState, ResultFields};
use crate::exact::sys;
use crate::exact::verdict::ComparisonVerdict;
use crate::exact::volumes::{self, MountPair};
use crate::exact::who::TestUser;

/// A call by a user, and the names that it works on.
#[derive(Clone, Copy)]
struct WalkStep {
    call: &'static SystemCallTest,
    who: TestUser,
    names: [&'static str; 4],
}

impl WalkStep {
    fn random_step(random: &mut Random) -> Self {
        let calls = calls::all_calls();
        let call = loop {
            let call = &calls[random.next_below(calls.len() as u64) as usize];
            // Descriptors from root are compared by the table; handles need the top directory.
            if call.group != CallGroup::Run && !call.given {
                break call;
            }
        };
        let who = TestUser::ALL[random.next_below(TestUser::ALL.len() as u64) as usize];
        let names = ["t", "o", "n", "d"].map(|usual| {
            let others = ["t", "o", "n", "d", "a", "b", "d/x", "d/y"];
            if random.next_below(2) == 0 { usual } else { others[random.next_below(8) as usize] }
        });
        Self { call, who, names }
    }

    fn test_case(&self) -> TestCase {
        let Self { call, who, .. } = *self;
        TestCase {
            call,
            kind: TargetKind::Regular,
            who,
            state: &TARGET_STATES[1],
            watched: false,
            volume: "walk",
        }
    }

    fn run(&self, top: &Path, dir: &Path) -> ResultFields {
        let mut acts = CallContext::new(dir, top, self.who);
        let [t, o, n, d] = self.names.map(|name| dir.join(name));
        (acts.t, acts.o, acts.n, acts.d) = (t, o, n, d);
        (self.call.run)(&mut acts);
        let mut fields = std::mem::take(&mut acts.answers);
        let seen = look::walk_tree(dir);
        fields.extend(look::content_fields(dir, &seen));
        fields.extend(EarlierState::default().relative_fields("", seen, look::current_time()));
        // Times are compared only where the clock was waited for.
        fields.retain(|(key, _)| !key.contains("time") || key.starts_with("answer"));
        fields
    }
}

impl std::fmt::Display for WalkStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [t, o, n, d] = self.names;
        write!(f, "{} by {:?}, with t={t} o={o} n={n} d={d}", self.call.name, self.who)
    }
}

/// Volumes of the walks, and the number of directories used.
struct WalkVolumes {
    pair: MountPair,
    used: usize,
    /// Directories that are known to differ.
    different: BTreeSet<String>,
}

impl WalkVolumes {
    fn create_walk_dirs(&mut self) -> [PathBuf; 2] {
        self.used += 1;
        [&self.pair.ours, &self.pair.theirs].map(|top| {
            let dir = top.join(format!("walk{}", self.used));
            case::create_case_dir(&dir, TargetKind::Regular, &TARGET_STATES[1]);
            dir
        })
    }

    /// Runs a step on both; returns true if they are equal.
    fn run_step(
        &self,
        step: &WalkStep,
        dirs: &[PathBuf; 2],
        verdict: &mut ComparisonVerdict,
    ) -> bool {
        let ours = step.run(&self.pair.ours, &dirs[0]);
        let theirs = step.run(&self.pair.theirs, &dirs[1]);
        verdict.compare_results(&step.test_case(), &ours, &theirs)
    }

    /// Returns true if the steps lead to an unexplained difference.
    fn is_failing(&mut self, steps: &[WalkStep]) -> bool {
        let (dirs, mut verdict) = (self.create_walk_dirs(), crate::exact::new_verdict());
        let alike = |step| self.run_step(step, &dirs, &mut verdict);
        let _ = steps.iter().all(alike);
        verdict.count_unknown() > 0
    }

    /// Returns the shortest sequence of these steps that still fails.
    fn minimize_steps(&mut self, mut steps: Vec<WalkStep>) -> Vec<WalkStep> {
        let mut len = 1;
        while len < steps.len() {
            let tail = steps[steps.len() - len..].to_vec();
            if self.is_failing(&tail) {
                steps = tail;
                break;
            }
            len *= 2;
        }
        let mut at = 0;
        while at < steps.len() && steps.len() > 1 {
            let mut fewer = steps.clone();
            fewer.remove(at);
            if self.is_failing(&fewer) {
                steps = fewer;
            } else {
                at += 1;
            }
        }
        steps
    }

    fn random_walk(&mut self, seed: u64, steps: usize) {
        let mut random = Random::new(seed);
        let mut done: Vec<WalkStep> = vec![];
        let mut dirs = self.create_walk_dirs();
        for number in 0..steps {
            let step = WalkStep::random_step(&mut random);
            done.push(step);
            let mut verdict = crate::exact::new_verdict();
            let alike = self.run_step(&step, &dirs, &mut verdict);
            if verdict.count_unknown() > 0 {
                let report = verdict.format_report();
                let fewest = self.minimize_steps(std::mem::take(&mut done));
                let fewest: Vec<_> = fewest.iter().map(WalkStep::to_string).collect();
                panic!("seed {seed}, step {number}:\n{report}{}", fewest.join("\n"));
            }
            if !alike {
                self.different.insert(format!("walk{}", self.used));
                done.clear();
                dirs = self.create_walk_dirs();
            }
        }
    }
}

#[test]
fn random_call_sequences_match_kernel() {
    if !volumes::can_compare_mounts("walking beside the kernel's driver") {
        return;
    }
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (seeds, steps) = match number("DRACONIS_EXACT_SEED") {
        Some(seed) => (seed..seed + 1, number("DRACONIS_EXACT_STEPS").unwrap_or(10_000)),
        None => (1..4, 300),
    };
    sys::set_thread_umask(0o022);
    let mut ground = WalkVolumes {
        pair: MountPair::new("ext2", "1024", "512M", "rw,suid,dev"),
        used: 0,
        different: BTreeSet::new(),
    };
    for seed in seeds {
        ground.random_walk(seed, steps as usize);
    }
    ground.pair.check_and_compare(&ground.different);
}
