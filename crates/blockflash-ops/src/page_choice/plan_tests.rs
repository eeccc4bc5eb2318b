use super::super::select::{support_of_choice, support_of_summaries};
use super::*;
use crate::fixtures::gpu;
use crate::selection::{Problem, accepts, select};
use blockflash_sys::DType;

/// A batch with 8 heads of keys and 1024 pages of 128 slots each.
fn choice(batch: usize) -> ChoosePagesProblem {
    let (_, mut problem) = support_of_choice(DType::BF16).swap_remove(0);
    let cache = &mut problem.summaries.cache;
    cache.page_size = 128;
    (cache.batch, cache.capacity, cache.num_heads_kv) = (batch, 1024 * 128, 8);
    problem.num_heads_q = 32;
    problem
}

#[test]
fn few_sequences_are_shared_among_ctas() {
    let gpu = gpu(9, 0);
    for (batch, parts, blocks) in [(1, 16, 128), (3, 9, 216), (64, 1, 216)] {
        let problem = choice(batch);
        let plan = plan_choice(select(&problem, &gpu).unwrap(), &problem, &gpu).unwrap();
        assert_eq!((plan.plan.parts, plan.config.grid[0]), (parts, blocks), "{batch}");
        assert_eq!(problem.summaries.room(), Some([batch * 8 * 1024, batch * 8]));
    }
}

#[test]
fn summaries_take_the_pages_that_tokens_can_lie_in() {
    let gpu = gpu(8, 0);
    for (tokens, pages) in [(1, 1), (2, 2), (129, 2), (130, 3), (1 << 30, 1024)] {
        let problem = SummarizePagesProblem { summaries: choice(2).summaries, tokens };
        let plan = plan_summaries(select(&problem, &gpu).unwrap(), &problem, &gpu).unwrap();
        assert_eq!((plan.plan.most_pages, plan.config.grid[0]), (pages, 16 * pages as u32));
    }
}

#[test]
fn what_no_kernel_takes_is_named() {
    fn reason<P: Problem>(problem: &P) -> String {
        select(problem, &gpu(9, 0)).unwrap_err().to_string()
    }
    let (_, of_f32) = support_of_summaries(DType::F32).swap_remove(0);
    assert!(reason(&of_f32).contains("f32"));
    let (_, narrow) = support_of_summaries(DType::F16).swap_remove(1);
    assert!(reason(&narrow).contains("head_dim 59"));
    let mut small = choice(1);
    small.summaries.cache.page_size = 24;
    assert!(reason(&small).contains("pages of 24 slots"));
    let mut empty = choice(1);
    empty.summaries.cache.capacity = 0;
    assert!(reason(&empty).contains("the cache has 0 slots, expected at least 1"));
    // A kernel for the other step.
    let kernel = select(&support_of_summaries(DType::BF16)[0].1, &gpu(9, 0)).unwrap();
    let error = accepts(kernel, &choice(1), &gpu(9, 0)).unwrap_err();
    assert!(error.to_string().contains("something else"), "{error}");
}

#[test]
fn strides_that_16_bytes_do_not_divide_are_refused() {
    let mut problem = choice(2);
    problem.summaries.strides[0] = 260;
    let gpu = gpu(9, 0);
    let error = plan_choice(select(&problem, &gpu).unwrap(), &problem, &gpu).unwrap_err();
    assert!(matches!(error, Error::Misaligned { what: "summaries", .. }), "{error}");
}
