use super::*;
use crate::{DType, Device, Tensor};
use std::ptr::{null, null_mut};

/// Three rows of 32 bytes, from rows of 64 to rows of 48.
fn plan() -> blockflash_row_copy_params {
    let none = blockflash_row_copy {
        from: null(),
        to: null_mut(),
        from_pitch: 0,
        to_pitch: 0,
        rows: 0,
        pieces: 0,
    };
    let copy = blockflash_row_copy { from_pitch: 64, to_pitch: 48, rows: 3, pieces: 2, ..none };
    blockflash_row_copy_params { copies: [copy, none, none, none], count: 1 }
}

fn tiles(change: impl FnOnce(&mut blockflash_row_copy_params), from_column: usize) -> Fit<i128> {
    let stream = Device::cpu().stream().unwrap();
    let zeros = |columns| Tensor::zeros(&stream, DType::F32, &[3, columns]).unwrap();
    let (from, mut to) = (zeros(16), zeros(12));
    let from = from.view().slice(1, from_column..from_column + 8).unwrap();
    let copies = vec![(to.view_mut().slice(1, 4..12).unwrap(), from)];
    let mut plan = plan();
    change(&mut plan);
    manifest::RowCopy.fit(&plan, &RowCopyOperands { copies }, &mut { plan })
}

#[test]
fn a_plan_of_other_rows_is_refused() {
    assert_eq!(tiles(|_| {}, 8), Ok(1));
    let refused: [fn(&mut blockflash_row_copy_params); 9] = [
        |p| p.count = 0,
        |p| p.count = 2,
        |p| p.copies[0].rows = 4,
        |p| p.copies[0].rows = 0,
        |p| p.copies[0].pieces = 3,
        |p| p.copies[0].pieces = -2,
        |p| p.copies[0].from_pitch = 80,
        |p| p.copies[0].to_pitch = 32,
        |p| p.copies[0].to_pitch = -48,
    ];
    for (at, change) in refused.into_iter().enumerate() {
        assert!(tiles(change, 8).is_err(), "{at}");
    }
    let error = tiles(|_| {}, 7).unwrap_err();
    assert!(error.contains("expected a multiple of 16 bytes"), "{error}");
}
