"""Operations that trainer and embedded engine share, so that both compute the same bits."""
