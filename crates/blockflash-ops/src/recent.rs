//! The plans of the calls that a thread repeats. A plan follows from problem, GPU and how its
//! kernel was chosen, so it is found by these and never becomes wrong.

use crate::Result;
use crate::selection::Problem;
use blockflash_safe::Device;
use blockflash_sys::Kernel;
use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;

/// What is decided about a problem: the kernel, and the launches that begin with it.
pub(crate) struct Planned<L> {
    pub(crate) kernel: &'static Kernel,
    pub(crate) plan: L,
}

/// How the kernel of a plan was chosen.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Chosen {
    /// By selection.
    Now,
    /// When the call was prepared.
    Ahead(&'static Kernel),
}

impl PartialEq for Chosen {
    fn eq(&self, other: &Self) -> bool {
        match (*self, *other) {
            (Chosen::Now, Chosen::Now) => true,
            (Chosen::Ahead(this), Chosen::Ahead(other)) => std::ptr::eq(this, other),
            _ => false,
        }
    }
}

/// Plans of one operation that a thread keeps: the calls of a model that differ in their sizes.
const KEPT: usize = 16;

/// The plans of one operation, of which the oldest makes room.
struct Plans<P, L> {
    plans: Vec<(P, Device, Chosen, Rc<Planned<L>>)>,
    /// The place of the next one, once all are taken.
    next: usize,
}

thread_local! {
    /// [`Plans`] of all operations that this thread has used.
    static OPERATIONS: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

impl<P: Problem, L> Plans<P, L> {
    fn find(&self, problem: &P, device: &Device, chosen: Chosen) -> Option<Rc<Planned<L>>> {
        let is_same = |(other, place, how, _): &&(P, Device, Chosen, _)| {
            *how == chosen && place == device && other == problem
        };
        self.plans.iter().find(is_same).map(|(.., planned)| Rc::clone(planned))
    }

    fn keep(&mut self, entry: (P, Device, Chosen, Rc<Planned<L>>)) {
        if self.plans.len() < KEPT {
            return self.plans.push(entry);
        }
        self.plans[self.next] = entry;
        self.next = (self.next + 1) % KEPT;
    }
}

/// The plan of a problem on a device: a kept one, or one that is made now and kept.
pub(crate) fn planned<P: Problem, L: 'static>(
    problem: &P,
    device: &Device,
    chosen: Chosen,
    make: impl FnOnce() -> Result<Planned<L>>,
) -> Result<Rc<Planned<L>>> {
    let find = |operations: &RefCell<Vec<Box<dyn Any>>>| {
        let operations = operations.borrow();
        let plans = operations.iter().find_map(|plans| plans.downcast_ref::<Plans<P, L>>());
        plans.and_then(|plans| plans.find(problem, device, chosen))
    };
    // A thread that ends keeps nothing any more.
    if let Ok(Some(found)) = OPERATIONS.try_with(find) {
        return Ok(found);
    }
    let made = Rc::new(make()?);
    let _ = OPERATIONS.try_with(|operations| {
        let mut operations = operations.borrow_mut();
        let mut of_operation = operations.iter().position(|plans| plans.is::<Plans<P, L>>());
        let at = *of_operation.get_or_insert(operations.len());
        if at == operations.len() {
            operations.push(Box::new(Plans::<P, L> { plans: Vec::new(), next: 0 }));
        }
        if let Some(plans) = operations[at].downcast_mut::<Plans<P, L>>() {
            plans.keep((*problem, *device, chosen, Rc::clone(&made)));
        }
    });
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttentionProblem, DType, Error};
    use blockflash_sys::manifest;

    fn problem(seqlen: usize) -> AttentionProblem {
        AttentionProblem::dense(DType::F16, [1, seqlen, seqlen], [1; 2], 64)
    }

    fn plan<L: 'static>(seqlen: usize, plan: L) -> Rc<Planned<L>> {
        let kernel = &manifest::kernels()[0];
        let make = || Ok(Planned { kernel, plan });
        planned(&problem(seqlen), &Device::cpu(), Chosen::Now, make).unwrap()
    }

    #[test]
    fn a_plan_is_made_once_and_found_by_its_problem() {
        assert_eq!(plan(1, 10).plan, 10);
        assert_eq!(plan(1, 11).plan, 10);
        assert_eq!(plan(2, 12).plan, 12);
        let causal = problem(1).with_mask(crate::Mask::causal());
        let kernel = &manifest::kernels()[0];
        let make = || Ok(Planned { kernel, plan: 13 });
        assert_eq!(planned(&causal, &Device::cpu(), Chosen::Now, make).unwrap().plan, 13);
        // Another type of plan is of another operation, and another thread has plans of its own.
        assert_eq!(plan(1, "other").plan, "other");
        assert_eq!(std::thread::spawn(|| plan(1, 14).plan).join().unwrap(), 14);
    }

    #[test]
    fn kernels_of_prepared_calls_have_plans_of_their_own() {
        let [first, second] = [&manifest::kernels()[0], &manifest::kernels()[1]];
        let chosen = [Chosen::Now, Chosen::Ahead(first), Chosen::Ahead(second)];
        for round in 0..2 {
            for (at, chosen) in chosen.into_iter().enumerate() {
                let make = || Ok(Planned { kernel: first, plan: (round, at) });
                let found = planned(&problem(1), &Device::cpu(), chosen, make).unwrap();
                assert_eq!(found.plan, (0, at));
            }
        }
    }

    #[test]
    fn the_oldest_plan_makes_room() {
        for round in 0..3 {
            for seqlen in 0..=KEPT {
                assert_eq!(plan(seqlen, (round, seqlen)).plan, (round, seqlen));
                assert_eq!(plan(seqlen, (9, 9)).plan, (round, seqlen));
            }
        }
        for seqlen in 1..=KEPT {
            assert_eq!(plan(seqlen, (9, 9)).plan, (2, seqlen));
        }
    }

    #[test]
    fn an_error_is_not_kept() {
        let fails = || Err::<Planned<u8>, _>(Error::NotPrepared { op: "" });
        assert!(planned(&problem(1), &Device::cpu(), Chosen::Now, fails).is_err());
        assert_eq!(plan(1, 5u8).plan, 5);
    }
}
