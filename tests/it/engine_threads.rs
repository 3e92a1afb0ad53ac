//! Threads that use models at once in a budget that holds what they pin and little more.

use std::sync::Mutex;
use std::time::Duration;

use vbar::driver::Driver;
use vbar::model::synth::tensor_seed;
use vbar::options::{Eviction, Threads};
use vbar::{Fault, ModelBar, Reason, RuntimeOptions};

use crate::engine_more::{Rig, SEED, eventually, threaded};
use crate::torch::Random;
use crate::world::{budget_options, pattern_sum};

/// Pages of the file and of the budget.
const MODEL: u64 = 24;
const BUDGET: u64 = 12;

/// Passes of three threads over two VBARs of one file, two of them over the same: what was refused.
fn passes(options: RuntimeOptions, count: usize) -> Vec<(usize, usize, Reason)> {
    let rig = Rig::new(options);
    let path = rig.path("model", MODEL);
    let models: Vec<ModelBar> =
        (0..2).map(|_| rig.world.runtime.open_model(&path).unwrap()).collect();
    let (refused, target) = (Mutex::new(Vec::new()), rig.world.scratch());
    let streams: Vec<_> = (0..3).map(|_| rig.world.another_stream()).collect();
    std::thread::scope(|scope| {
        for (thread, stream) in streams.into_iter().enumerate() {
            let (rig, model, refused) = (&rig, &models[thread % 2], &refused);
            let target = target.offset(thread as u64 * 8);
            scope.spawn(move || {
                let context = rig.world.runtime.device().context;
                rig.world.sim.ctx_set_current(Some(context)).unwrap();
                let mut expected = 0u64;
                let _scale = model.fault(0, stream).unwrap();
                for at in 0..count * model.model().tensors().len() {
                    let tensor = at % model.model().tensors().len();
                    match model.fault(tensor, stream).unwrap() {
                        Fault::Resident(guard) | Fault::HostMapped(guard) => {
                            let (address, bytes) = (guard.address(), guard.bytes());
                            rig.world.sum(address, bytes, target, Duration::ZERO, stream);
                            let seed = tensor_seed(SEED, &model.model().tensors()[tensor].name);
                            expected = expected.wrapping_add(pattern_sum(bytes, seed));
                            // Pins overlap.
                            std::thread::sleep(Duration::from_micros(100));
                            guard.unpin().unwrap();
                        }
                        Fault::Offloaded(refusal) => {
                            refused.lock().unwrap().push((thread, tensor, refusal.reason));
                        }
                    }
                }
                assert_eq!(rig.world.word(target, stream), expected);
            });
        }
    });
    rig.check_shut(models);
    refused.into_inner().unwrap()
}

#[test]
fn threads_that_pin_less_than_the_budget_are_never_refused() {
    for threads in [Threads::On, Threads::Off] {
        for eviction in [Eviction::Aliasing, Eviction::Strict] {
            let threads = Some(threads);
            let options = RuntimeOptions { threads, eviction, ..budget_options(BUDGET) };
            let refused = passes(options, 12);
            assert!(refused.is_empty(), "{threads:?} {eviction:?}: {refused:?}");
        }
    }
}

#[test]
fn a_model_with_a_plan_is_not_starved_by_a_newer_one_that_has_none() {
    let rig = Rig::new(threaded(BUDGET));
    let (planned, newer) = (rig.model("planned", MODEL), rig.model("newer", MODEL));
    rig.check_passes(&planned, 4);
    eventually("a plan", || rig.plans() > 0);
    let (stream, count) = (rig.world.stream, planned.model().tensors().len() as u64);
    // In no order, so that the newer one is not learned: it takes what streams of the other, which
    // streams through what its plan keeps, which streams then.
    let mut random = Random(5);
    let mut resident = |model: &ModelBar, round: u64, what: &str| {
        let tensor = random.below(count) as usize;
        match model.fault(tensor, stream).unwrap() {
            Fault::Resident(guard) | Fault::HostMapped(guard) => guard.unpin().unwrap(),
            Fault::Offloaded(refusal) => {
                let (own, other) = (planned.vbar().draw(40), newer.vbar().draw(40));
                panic!("{what}, round {round}: {refusal}: {own} and {other}")
            }
        }
    };
    let held = planned.fault(0, stream).unwrap();
    for round in 0..300 {
        resident(&newer, round, "the newer one");
        resident(&planned, round, "the planned one");
    }
    drop(held);
    rig.check_shut(vec![planned, newer]);
}
